"""What a visitor asks the client to do that drives a session: to run a cell, to say how it goes. And the answers.

The controller passes both on. The answers are dataclasses, as those who show them to others need their types.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import msgspec

from nbdist.wire.base.message import Message, Seconds

# "lost": its ranks ended under it. "ended": it is not known how, as that was before anybody asked.
CellState = Literal["queued", "running", "done", "failed", "interrupted", "lost", "ended"]


class ErrandRequest(msgspec.Struct, array_like=True, tag=True, frozen=True):
    """Base of what can be asked."""


class RunCell(ErrandRequest, frozen=True):
    """Run code on ranks, as soon as they are free. timeout: seconds after which they are interrupted."""

    code: str
    ranks: str | None = None
    timeout: Seconds | None = None


class LookAtCell(ErrandRequest, frozen=True):
    """How does a cell go?

    since: characters of its output that are known; -1: only the last are wanted. rank: whose output alone. wait:
    seconds to wait for its end first.
    """

    cell: int
    since: int = 0
    rank: int | None = None
    wait: Seconds = 0.0


class InterruptCells(ErrandRequest, frozen=True):
    """Stop a cell, or None: all that these ranks run or are to run. now: not only after the step that they are in."""

    cell: int | None = None
    ranks: str | None = None
    now: bool = False


class LookAtRanks(ErrandRequest, frozen=True):
    """How are the ranks, and what do they run? memory: whether they measure what they hold, which takes longer."""

    memory: bool = False


class ReadStacks(ErrandRequest, frozen=True):
    """Where are the ranks?"""

    ranks: str | None = None


class ReadFlight(ErrandRequest, frozen=True):
    """Which collectives have ranks made last?"""

    ranks: str | None = None
    count: int = 10


class ReadMemory(ErrandRequest, frozen=True):
    """What is the memory of ranks held as?"""

    ranks: str | None = None


class ReadWhy(ErrandRequest, frozen=True):
    """Why did the steps of the last cell that trained take as long as they did?"""


class ReadVariables(ErrandRequest, frozen=True):
    """Which variables are on ranks, or what is there to know of one?"""

    name: str = ""
    ranks: str | None = None


class ReadLogs(ErrandRequest, frozen=True):
    """What has a cell printed? cell: None: the newest that printed. words: only lines with these. since: as above."""

    cell: int | None = None
    rank: int | None = None
    words: str = ""
    since: int = 0


class SaveRanks(ErrandRequest, frozen=True):
    """Save the session to a folder. keep: how many saves may stay there. stop: what the ranks run, after a step."""

    directory: str
    keep: int | None = 2
    stop: bool = False


class HealRanks(ErrandRequest, frozen=True):
    """Replace ranks that have died. kill: end these ranks first, which live."""

    ranks: str | None = None
    kill: bool = False


class StopRanks(ErrandRequest, frozen=True):
    """End the ranks."""


AnyErrand = (
    RunCell
    | LookAtCell
    | InterruptCells
    | LookAtRanks
    | ReadStacks
    | ReadFlight
    | ReadMemory
    | ReadWhy
    | ReadVariables
    | ReadLogs
    | SaveRanks
    | HealRanks
    | StopRanks
)


@dataclass(frozen=True)
class TextPage:
    """A page of text. next: pass it as `since` for what follows. left: characters that follow, as far as is known."""

    text: str
    next: int = 0
    left: int = 0


@dataclass(frozen=True)
class CellBrief:
    """A cell in a list. by: who has started it. code: its first line."""

    cell: int
    state: CellState
    by: str
    ranks: str
    seconds: float
    code: str


@dataclass(frozen=True)
class CellNews:
    """How a cell goes.

    cell, by, ranks, code: its number, who has started it, where, and its first line. seconds: for how long it has run.
    output: a page of what it has printed; [0-3] stands before a line of ranks 0 to 3. next,
    left: of the page. waits: by rank, what one that has not moved for seconds waits in, and for whom. failed_rank,
    error: the rank that failed first, and its exception or signal. failure: the report, with the traceback of that
    rank. values: by ranks, the value of the last expression. displays: what an agent's cell has displayed, as text,
    once it has ended. note: what else there is to know.
    """

    cell: int
    state: CellState
    by: str
    ranks: str
    code: str
    seconds: float
    output: str = ""
    next: int = 0
    left: int = 0
    waits: dict[str, str] = field(default_factory=dict)
    failed_rank: int | None = None
    error: str = ""
    failure: str = ""
    values: dict[str, str] = field(default_factory=dict)
    displays: list[str] = field(default_factory=list)
    note: str = ""


@dataclass(frozen=True)
class RankNews:
    """How a rank is. state: "idle", "busy" or "dead". doing: where it is. memory, device_memory: bytes, if wanted."""

    rank: int
    node: str
    pid: int
    device: str
    state: str
    doing: str
    memory: int | None
    device_memory: int | None


@dataclass(frozen=True)
class SessionNews:
    """How a session is. backend: of the process group. cells: what runs, what waits for its ranks, and the last."""

    session: str
    backend: str
    ranks: list[RankNews]
    cells: list[CellBrief]


@dataclass(frozen=True)
class StopNews:
    """What an interrupt has reached. running, queued: cells that are being stopped, and that will not run."""

    running: list[int]
    queued: list[int]


class Errand(Message, frozen=True):
    """A visitor's request to the client. Its answer is ErrandDone.

    number: counts the visitor's. who: the visitor, for people. visitor: its lane, which the controller fills in.
    """

    number: int
    who: str
    request: AnyErrand
    visitor: bytes = b""


class ErrandDone(Message, frozen=True):
    """What an errand has brought: one of the fields, or `error`: why it can't be done.

    number, visitor: as in the Errand. alone: whether that is because the session has no client.
    """

    number: int
    visitor: bytes = b""
    error: str = ""
    alone: bool = False
    text: TextPage | None = None
    cell: CellNews | None = None
    session: SessionNews | None = None
    stopped: StopNews | None = None
