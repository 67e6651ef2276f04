"""What a Jupyter server shows of its machine: the sessions of its user, and who holds which GPU."""

from __future__ import annotations

import socket

import psutil

from nbdist import visits
from nbdist._version import __version__
from nbdist.metrics.node.driver import within_limit
from nbdist.metrics.node.nvml import read_once
from nbdist.metrics.node.sample import GpuSample
from nbdist.wire.pages.machine_messages import MACHINE_PROTOCOL, GpuRow, Holder, Machine, SessionRow


def look() -> Machine:
    """Return what there is now. Takes up to seconds, so call it in a thread."""
    found = visits.sessions()
    controllers = {each.description.controller: each.name for each in found if each.description is not None}
    none: list[GpuSample] = []
    gpus = within_limit(read_once, none)
    return Machine(
        MACHINE_PROTOCOL,
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
