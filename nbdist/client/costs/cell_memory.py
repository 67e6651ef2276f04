"""What each cell cost in memory, shown below it: in the notebook's own process, or over the ranks that it ran on.

Owns when cells are measured and which results are kept. How the figures look is up to `memory_report`.
"""

from __future__ import annotations

import re
import time
from collections import OrderedDict
from collections.abc import Collection, Sequence
from typing import Any

import msgspec
from IPython.core.interactiveshell import InteractiveShell

from nbdist import shells
from nbdist.base.text import size
from nbdist.client.costs.memory_report import HERE, CellCost
from nbdist.client.ranks import observers
from nbdist.client.ranks.observers import Observer
from nbdist.client.ranks.task_record import TaskRecord
from nbdist.client.session import session as sessions
from nbdist.client.session.current import living_session
from nbdist.errors import UsageError
from nbdist.metrics.allocation import oom
from nbdist.metrics.memory import DeviceUsage, MemoryMeter, MemoryUsage, Usage
from nbdist.metrics.node.sample import GpuSample, Sample, gpu_among

MODES = ("on", "compact", "off")
MARK = re.compile(r"%%memory[ \t]*(on|compact)?[ \t]*(?:(?<=[ \t])#[^\r\n]*)?(?=[\r\n]|$)")
_NO_WORK = re.compile(r"(%dist(ributed)?\b.*|#.*)?")  # a line
_GROWTH = 1 << 20  # bytes that a cell has to keep each time before it looks like a leak
_TIMES = 3
_REMEMBERED = 256  # cells


class CellMemory(Observer):
    """Measures the cells of a notebook.

    Args:
        shell: The notebook's shell.

    Attributes:
        mode: "on" (a table below each cell), "compact" (a line) or "off".
        last: The cost of the newest cell that was measured.
    """

    def __init__(self, shell: InteractiveShell) -> None:
        self.mode = "off"
        self.last: CellCost | None = None
        self._shell = shell
        self._cell: _Cell | None = None
        self._within: list[Any] = []  # cells that it runs
        self._tasks: dict[TaskRecord, _Cell] = {}  # tasks that are measured, and the cells that started them
        self._growth: OrderedDict[int, int] = OrderedDict()  # how many times in a row a cell has kept memory

    def install(self) -> None:
        """Observe every cell from now on."""
        events: Any = self._shell.events
        events.register("pre_run_cell", self._begin)
        events.register("post_run_cell", self._end)
        observers.subscribe(self)

    def show_this_cell(self, mode: str) -> None:
        """Measure the rest of the running cell, whatever the mode."""
        if self._cell is None:
            return
        self._cell.mode, self._cell.explicit = mode, True
        if self._cell.meter is None:
            self._cell.measure()

    def _begin(self, info: Any) -> None:
        if self._cell is not None:  # a cell run by another cell is part of it
            self._within.append(info)
            return
        if not shells.in_cell():
            return
        lines = info.raw_cell.splitlines()
        code = first_code(lines)
        marked = MARK.match(lines[code].strip()) if code is not None else None
        mode = (marked[1] or "on") if marked else self.mode
        self._cell = _Cell(info, mode, explicit=marked is not None)
        if mode != "off":
            self._cell.measure()

    def _end(self, result: Any) -> None:
        cell, info = self._cell, getattr(result, "info", None)
        if cell is None:
            return
        if any(info is each for each in self._within):
            self._within = [each for each in self._within if each is not info]
            return
        self._cell, self._within = None, []  # also if IPython itself was interrupted, and has lost track of the cell
        error = getattr(result, "error_in_exec", None)
        if error is not None and (words := oom.explain(error, self._shell.user_ns)):
            print(words)
        if cell.meter is None:
            return
        cost = cell.conclude()
        mode = cell.mode if cell.explicit else self.mode
        if mode == "off" or (not cell.explicit and _does_nothing(cell.code)) or not cost.usages:
            return
        self.last = msgspec.structs.replace(cost, hint=self._leak(cell.code, cost))
        shown = {"text/plain": self.last.render(mode)}
        if mode == "on" and shells.in_kernel():
            shown["text/html"] = self.last.html()
        self._shell.display_pub.publish(shown, {"nbdist": {"memory": self.last.data}})

    def cell_began(self, task: TaskRecord) -> None:
        """Have the ranks measure the task if the running cell is measured."""
        if task.runs_users_code and self._cell is not None and self._cell.meter is not None:
            task.metered = msgspec.structs.replace(task.metered, memory=True)
            self._cell.begin_task()
            self._tasks[task] = self._cell

    def cell_ended(self, task: TaskRecord) -> None:
        """Add what a task cost. Called in the task's thread, which for a background task is not the cell's."""
        cell = self._tasks.pop(task, None)
        if cell is None:
            return
        cost = cost_of(task)
        if not cell.closed:
            cell.add(cost)
        elif cost.usages:
            self.last = cost
            task.say(cost.render("compact"))

    def _leak(self, code: str, cost: CellCost) -> str:
        """Return a hint if this cell has kept memory each of the last times."""
        key = hash(code.strip())
        growth = max(cost.growths(), key=lambda found: found[0], default=(0, ""))
        times = self._growth.pop(key, 0) + 1 if growth[0] > _GROWTH else 0
        self._growth[key] = times
        while len(self._growth) > _REMEMBERED:
            self._growth.popitem(last=False)
        if times < _TIMES:
            return ""
        amount = size(growth[0], signed=True)
        return (
            f"this cell has kept memory {times} times in a row, now {amount} ({growth[1]}). "
            "What does it append to? A loss that is kept without `.item()` keeps its whole graph."
        )


def _does_nothing(code: str) -> bool:
    """Return whether a cell contains only verbs of `%distributed`, and comments."""
    return all(_NO_WORK.fullmatch(line.strip()) for line in code.splitlines())


class _Cell:
    """A running cell.

    Attributes:
        code: Its text, without a `%%memory` on top.
        mode: How its cost is shown.
        explicit: Whether it starts with `%%memory`.
        meter: Measures the notebook's own process; None if nothing is measured.
        closed: Whether it has ended.
    """

    def __init__(self, info: Any, mode: str, *, explicit: bool) -> None:
        self.code: str = MARK.sub("", info.raw_cell.lstrip(), count=1) if explicit else info.raw_cell
        self.mode = mode
        self.explicit = explicit
        self.meter: MemoryMeter | None = None
        self.closed = False
        self._ranks: CellCost | None = None
        self._devices: _DevicePeaks | None = None
        self._tasks = 0

    def measure(self) -> None:
        """Measure from now on."""
        self.meter = MemoryMeter().begin()

    def begin_task(self) -> None:
        """Count a measured task that it has started."""
        self._tasks += 1
        if self._devices is None:
            self._devices = _DevicePeaks.watch()

    def add(self, cost: CellCost) -> None:
        """Add the cost of one of its tasks."""
        self._ranks = cost if self._ranks is None else self._ranks.then(cost)

    def conclude(self) -> CellCost:
        """Return what it cost: on the ranks if it ran anything there, else in the notebook's process."""
        self.closed = True
        assert self.meter is not None
        own = self.meter.end()
        ranks = self._ranks
        if ranks is None:
            return CellCost(own.seconds, {} if self._tasks else {HERE: own})
        if self._devices is not None:
            seen = self._devices.end()
            ranks = msgspec.structs.replace(
                ranks, usages={rank: raise_peaks(usage, seen) for rank, usage in ranks.usages.items()}
            )
        return msgspec.structs.replace(ranks, seconds=own.seconds, notebook=own)


def cost_of(task: TaskRecord) -> CellCost:
    """Return what a task cost, according to its ranks' replies."""
    usages = {rank: reply.memory for rank, reply in sorted(task.replies.items()) if reply.memory is not None}
    failures = task.failures
    missing = {
        rank: "died" if rank in failures and failures[rank].kind == "died" else "has not answered"
        for rank in task.ranks
        if rank not in usages
    }
    return CellCost(time.monotonic() - task.started, usages, missing)


class _DevicePeaks:
    """The highest use of each GPU, by any process, as seen by the nodes' samplers."""

    def __init__(self, session: sessions.Session) -> None:
        from nbdist.client.costs.monitor import Monitor

        self._began = time.time()
        self._fullest: dict[str, GpuSample] = {}
        self._unsubscribe = Monitor.of(session).subscribe(self._note)

    @classmethod
    def watch(cls) -> _DevicePeaks | None:
        """Start watching; return None if no rank has a GPU."""
        session = living_session()
        if session is None or all(info.device == "cpu" for info in session.ranks):
            return None
        return cls(session)

    def end(self) -> list[GpuSample]:
        """Stop watching, and return the sample with the highest use of each GPU."""
        self._unsubscribe()
        return list(self._fullest.values())

    def _note(self, sample: Sample) -> None:
        for node in sample.nodes:
            for gpu in node.gpus if node.at >= self._began else ():
                before = self._fullest.get(gpu.uuid)
                if before is None or (gpu.used or 0) > (before.used or 0):
                    self._fullest[gpu.uuid] = gpu


def raise_peaks(usage: MemoryUsage, seen: Collection[GpuSample]) -> MemoryUsage:
    """Return the usage with the peaks of whole devices that were seen from outside.

    Args:
        usage: What a process measured by itself.
        seen: Samples of GPUs at their highest use, by any process.
    """

    def raised(one: DeviceUsage) -> DeviceUsage:
        if one.device is None:
            return one
        gpu = gpu_among(one.uuid, seen)
        peak = max(one.device.peak or 0, (gpu.used or 0) if gpu is not None else 0)
        return msgspec.structs.replace(one, device=Usage(one.device.start, one.device.end, peak, True))

    return msgspec.structs.replace(usage, devices={name: raised(one) for name, one in usage.devices.items()})


def parse_mark(line: str) -> str:
    """Return the mode that a `%%memory` line asks for.

    Raises:
        UsageError: The line is invalid.
    """
    marked = MARK.fullmatch(f"%%memory {line}".rstrip())
    if marked is None:
        raise UsageError(f"%%memory takes `compact` or nothing, got {line.strip()!r}: `%%memory`, `%%memory compact`")
    return marked[1] or "on"


def first_code(lines: Sequence[str]) -> int | None:
    """Return where the first line is that is neither blank nor a comment."""
    return next((at for at, line in enumerate(lines) if line.strip() and not line.lstrip().startswith("#")), None)


def strip_mark(lines: list[str]) -> list[str]:
    """Return a cell's lines without a leading `%%memory`."""
    first = next((at for at, line in enumerate(lines) if line.strip()), None)
    if first is None or not MARK.fullmatch(lines[first].strip()):
        return lines
    return strip_line(lines, first)


def strip_line(lines: list[str], first: int) -> list[str]:
    """Return a cell's lines without its first one that is not blank, so that all other lines keep their numbers.

    A cell magic below it has to be the first line for IPython to see it.
    """
    below = next((at for at in range(first + 1, len(lines)) if lines[at].strip()), None)
    rest = [*lines[:first], "\n", *lines[first + 1 :]]
    if below is None or not lines[below].startswith("%%"):
        return rest
    return [rest[below], *rest[:below], *rest[below + 1 :]]
