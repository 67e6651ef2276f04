"""What a Jupyter server shows of its machine: the sessions of its user, and who holds which GPU."""

from __future__ import annotations

import socket

import msgspec
import psutil

from nbdist import visits
from nbdist._version import __version__
from nbdist.metrics.node.driver import within_limit
from nbdist.metrics.node.nvml import read_once
from nbdist.metrics.node.sample import GpuSample
from nbdist.wire.messages.visitor_messages import RunningCell

PROTOCOL = 1


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
    """A process that holds memory of a GPU. `session`: whose rank it is; empty: none of this user's here."""

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
    """The machine of a server. `protocol`, `version`: what the server speaks, and its nbdist."""

    protocol: int
    version: str
    host: str
    sessions: list[SessionRow]
    gpus: list[GpuRow]


def look() -> Machine:
    """Return what there is now. Takes up to seconds, so call it in a thread."""
    found = visits.sessions()
    controllers = {each.description.controller: each.name for each in found if each.description is not None}
    none: list[GpuSample] = []
    gpus = within_limit(read_once, none)
    return Machine(
        PROTOCOL,
        __version__,
        socket.gethostname(),
        [_row(each) for each in found],
        [_gpu(each, controllers) for each in gpus],
    )


def _row(found: visits.Found) -> SessionRow:
    told = found.description
    if told is None:
        return SessionRow(found.name, answers=False)
    return SessionRow(
        found.name,
        True,
        told.notebook,
        visits.client_of(told),
        told.ranks,
        told.nodes,
        told.gpus,
        told.memory,
        told.running,
        told.since,
    )


def _gpu(gpu: GpuSample, controllers: dict[int, str]) -> GpuRow:
    holders = [_holder(pid, memory, controllers) for pid, memory in sorted(gpu.by_pid.items())]
    return GpuRow(gpu.index, gpu.name, gpu.total, gpu.used, gpu.utilization, holders)


def _holder(pid: int, memory: int, controllers: dict[int, str]) -> Holder:
    try:
        process = psutil.Process(pid)
        user, program = process.username(), process.name()
        session = next((controllers[each.pid] for each in process.parents() if each.pid in controllers), "")
    except psutil.Error:  # it has ended, or is in another container
        return Holder(pid, memory, "", "", "")
    return Holder(pid, memory, user, program, session)
