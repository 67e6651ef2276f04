"""What it costs and brings to compute activations again: a cell against the run of the same code before.

Activation checkpointing is such a change, and so is a smaller budget for activations. How much a step recomputes is
seen in its FLOPs, whoever has asked for it.
"""

from __future__ import annotations

import statistics
from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

from nbdist.base.text import percent, size
from nbdist.client.ranks.task_record import TaskRecord
from nbdist.metrics.memory import MemoryUsage
from nbdist.metrics.node.sample import StepSample

_SAME = 0.01  # share by which figures of the same work may differ
_REMEMBERED = 64  # cells


class Run(NamedTuple):
    """The steps of a cell.

    Attributes:
        cell: Its number.
        seconds: Of a typical step, on the slowest rank.
        flops: Of the model, in a step of a rank.
        hardware: FLOPs that were carried out.
        units: Samples or tokens of a step; None: not known.
        peak: Bytes in tensors on the fullest GPU; None: not measured.
    """

    cell: int
    seconds: float
    flops: float
    hardware: float
    units: float | None
    peak: int | None


class Recomputation:
    """Compares each cell that makes training steps with the run of the same code on the same ranks before."""

    def __init__(self) -> None:
        self._runs: OrderedDict[tuple[str, tuple[int, ...]], Run] = OrderedDict()

    def compare(self, task: TaskRecord) -> str:
        """Return what changed if this run recomputes more or less of the same work than the one before; else "".

        Args:
            task: Has ended.
        """
        replies = [task.replies.get(rank) for rank in task.ranks]
        steps = [reply.steps for reply in replies if reply is not None and reply.steps is not None]
        usages = [reply.memory for reply in replies if reply is not None and reply.memory is not None]
        if task.status != "ok" or len(steps) < len(task.ranks):
            return ""
        run = run_of(task.number, steps, usages if len(usages) == len(steps) else [])
        key = task.code.strip(), tuple(task.ranks)
        before = self._runs.pop(key, None)
        if run is not None:
            self._runs[key] = run
        while len(self._runs) > _REMEMBERED:
            self._runs.popitem(last=False)
        return describe_change(before, run) if before is not None and run is not None else ""


def run_of(cell: int, steps: Sequence[StepSample], usages: Sequence[MemoryUsage]) -> Run | None:
    """Return the figures of a run by its slowest rank and its fullest GPU; None if some are not known."""
    seconds = [each.typical for each in steps if each.typical]
    flops = [each.flops for each in steps if each.flops and each.hardware_flops and not each.uncounted]
    if not steps or len(seconds) < len(steps) or len(flops) < len(steps):
        return None
    hardware = statistics.fmean(each.hardware_flops or 0.0 for each in steps)
    peaks = [device.allocated.peak for usage in usages for device in usage.devices.values()]
    known = [peak for peak in peaks if peak is not None]
    peak = max(known) if known and len(known) == len(peaks) else None
    return Run(cell, max(seconds), statistics.fmean(flops), hardware, steps[0].units, peak)


def describe_change(before: Run, now: Run) -> str:
    """Return how a step changed with what it recomputes; "" if that, or nothing but that, did not change."""
    if not _same(before.flops, now.flops) or not _same(before.units or 0.0, now.units or 0.0):
        return ""
    if _same(before.hardware, now.hardware):
        return ""
    more = (now.hardware - before.hardware) / now.flops
    longer = now.seconds / before.seconds - 1
    found = [f"a typical step takes {percent(abs(longer))} {'longer' if longer >= 0 else 'less time'}"]
    if before.peak is not None and now.peak is not None:
        gained = before.peak - now.peak
        found.append(f"the peak of GPU memory is {size(abs(gained))} {'lower' if gained >= 0 else 'higher'}")
    how_many = f"{percent(abs(more))} {'more' if more > 0 else 'fewer'} FLOPs besides the model's"
    return f"{how_many} than in cell {before.cell} (recomputation, optimizer): {', '.join(found)} (measured)"


def _same(one: float, other: float) -> bool:
    return abs(one - other) <= _SAME * max(one, other)
