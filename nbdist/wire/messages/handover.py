"""How a client takes over a living session and how it leaves one, between clients and the controller."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from nbdist.wire.base.message import Message, Seconds
from nbdist.wire.messages.cells import Kind, Recovered, Reply
from nbdist.wire.messages.life import Died, RankInfo, RankSettings
from nbdist.wire.messages.output import Output
from nbdist.wire.processes.nodes import NodesWanted

Pid = Annotated[int, msgspec.Meta(ge=1, le=1 << 22)]  # as large as Linux has them
Leaving = Literal["crashed", "restarted", "detached"]  # how the last client has left


class Attach(Message, frozen=True):
    """Be the client of this session from now on. Its answer is Attached or AttachRefused.

    pid: the client's process. notebook, seat: as in ControllerSetup. take: also from a client that is there.
    """

    pid: Pid
    notebook: str = ""
    seat: str = ""
    take: bool = False


class AttachRefused(Message, frozen=True):
    """The session stays as it is. text: why, and what to type."""

    text: str


class Choices(Message, frozen=True):
    """What the client has chosen for these ranks, which the controller keeps for another one.

    plan: how models are made distributed, as JSON. on_death: what the client does when ranks die. nodes: which another
    start is to have; None: those of the last one. ends_at, end_source: when the allocation ends, by `time.time`, and
    who says so. warn: seconds before that, when it is to be said. idle: seconds without a cell after which ranks end.
    save: the folder to which the session is saved once its end is announced; "": it is not. every: seconds between two
    saves before that.
    """

    plan: str = "{}"
    on_death: Literal["ask", "heal", "stop"] = "ask"
    nodes: NodesWanted | None = None
    ends_at: float | None = None
    end_source: str = ""
    warn: Seconds = 600.0
    idle: Seconds | None = None
    save: str = ""
    every: Seconds | None = None


class StartedWith(RankSettings, frozen=True):
    """What the last start was told, as far as another start needs it: as in StartOptions and Start."""

    linger: Seconds
    nodes: NodesWanted | None
    choices: Choices


class UnseenCell(msgspec.Struct, frozen=True):
    """A cell whose end the last client has not seen, or not acted on.

    serial, kind, code, number, ranks: as in its Execute. seconds: since it began. ends: what ranks have reported, in
    order. printed: bytes of output. output: the newest part of it. watched: whether it ended while a client was there.
    """

    serial: int
    kind: Kind
    code: str
    number: int
    ranks: list[int]
    seconds: Seconds
    ends: list[Reply | Died | Recovered]
    printed: int
    output: list[Output]
    watched: bool


class Attached(Message, frozen=True):
    """The session is this client's now.

    ranks, backend, first_serial, slack: as in Started. generation: of the process groups. dead: ranks that have died.
    names: the variables on each rank. cells: what runs, and what has ended meanwhile. last: the last cell's number, 0
    for none. setup: the cells that newcomers run. notices: lines that no client has seen. away: seconds that the
    session has been without a client.
    """

    ranks: list[RankInfo]
    backend: str
    first_serial: int
    slack: Seconds
    generation: int
    dead: list[Died]
    names: dict[int, list[str]]
    started: StartedWith
    cells: list[UnseenCell]
    last: int
    setup: list[int]
    notices: list[str]
    away: Seconds


class Displaced(Message, frozen=True):
    """Another client has taken the session. text: who."""

    text: str


class Leave(Message, frozen=True):
    """The client leaves, and the ranks go on for some seconds. The controller answers with Goodbye."""

    seconds: Seconds
    how: Leaving


class Ending(Message, frozen=True):
    """The client is about to end: from its end on, which may be by force, it has left like this."""

    seconds: Seconds
    how: Leaving


class Goodbye(Message, frozen=True):
    """The client has left."""
