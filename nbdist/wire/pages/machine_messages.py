"""What a Jupyter server reports of its machine, and what a page asks it to do."""

from __future__ import annotations

import msgspec

from nbdist.wire.messages.visitor_messages import RunningCell

MACHINE_PROTOCOL = 1


class SessionRow(msgspec.Struct, frozen=True):
    """A session.

    Attributes:
        name: By which it is attached and stopped.
        answers: Whether it has answered; if not, nothing else is known.
        notebook: The file of its client, or of the last one; empty if unknown.
        client: "there", or how the last one has left.
        ranks: How many it has.
        nodes: The names of its machines.
        gpus: How many its ranks use.
        memory: Bytes that its ranks hold.
        running: What they run.
        since: When they were ready, in seconds since 1970.
    """

    name: str
    answers: bool
    notebook: str = ""
    client: str = ""
    ranks: int = 0
    nodes: list[str] = []
    gpus: int = 0
    memory: int = 0
    running: list[RunningCell] = []
    since: float = 0.0


class Holder(msgspec.Struct, frozen=True):
    """A process that holds memory of a GPU.

    Attributes:
        memory: Bytes.
        session: Whose rank it is; empty: none of this user's here.
    """

    pid: int
    memory: int
    user: str
    program: str
    session: str


class GpuRow(msgspec.Struct, frozen=True):
    """A GPU, its memory in bytes, and who holds it."""

    index: int
    name: str
    total: int | None
    used: int | None
    utilization: float | None
    holders: list[Holder]


class Machine(msgspec.Struct, frozen=True):
    """The machine of a server.

    Attributes:
        protocol: What the server speaks.
        version: Of its nbdist.
    """

    protocol: int
    version: str
    host: str
    sessions: list[SessionRow]
    gpus: list[GpuRow]


class NamedSession(msgspec.Struct, frozen=True):
    """The body of a request: the session that is meant."""

    name: str
