"""What has been recorded so far: cells, samples of ranks, training steps, as tables and as lines in a file.

Owns the columns, how much is kept, and the file. Samples are kept whenever something samples ranks, as the panel does;
`record` samples by itself. Cells that ran on ranks are always kept; without a session, the notebook's own cells are.
"""

from __future__ import annotations

import contextlib
import math
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from nbdist import shells
from nbdist.base.ranks import format_ranks
from nbdist.client.ranks.observers import Observer
from nbdist.errors import UsageError
from nbdist.metrics.node.sample import RankSample, Sample, StepSample, gpu_of, non_torch

if TYPE_CHECKING:
    from nbdist.client.costs.monitor import Monitor
    from nbdist.client.ranks.task_record import TaskRecord

_LOOKS = 600  # that are kept: ten minutes of one per second
_RANKS = 30_000  # in all kept samples together, about 60 MB: for 1,024 ranks that is 29 samples
_CELLS = 10_000

Row = dict[str, Any]


class History(Observer):
    """The notebook's record, returned by `nbdist.history()`.

    Tables are pandas DataFrames if pandas is installed, else lists of dicts with the same columns. Units: bytes, s,
    W, degrees Celsius, 10¹² FLOP/s (tflops), shares from 0 to 1; None or NaN where unknown.
    """

    def __init__(self) -> None:
        self._cells: deque[Row] = deque(maxlen=_CELLS)
        self._looks: deque[Sample] = deque(maxlen=_LOOKS)
        self._lock = threading.RLock()  # the monitor's thread and those of cells add to it
        self._file: _File | None = None
        self._recording = False
        self._monitor: Monitor | None = None
        self._unsubscribe: Callable[[], None] = lambda: None

    # --- tables

    @property
    def cells(self) -> Any:
        """Return what ran on ranks: a row for each cell, call and launch, in the order in which they ended.

        Without a session, the notebook's own cells since `%load_ext nbdist`: their ranks are "-1".

        Columns: at (start, in seconds since 1970), cell, kind, ranks, seconds, status ("ok", "error", "died",
        "interrupted", "running" if it was left running, "lost" with its session), code (its first line).
        """
        with self._lock:
            return _table(list(self._cells), _CELL_COLUMNS)

    @property
    def samples(self) -> Any:
        """Return a row for each rank in each sample. Rank -1 is the notebook's own process.

        Columns: at, cell, generation, the fields of `RankSample`, what the driver reports of the rank's GPU (gpu_total,
        gpu_used, non_torch, utilization, temperature, power, throttled), and its machine (node_memory_total,
        node_memory_used, node_cpu).
        """
        rows = [row for look in self.looks for row in _sample_rows(look)]
        return _table(rows, _SAMPLE_COLUMNS)

    @property
    def steps(self) -> Any:
        """Return a row for each rank in each sample in which it had made steps since the sample before.

        Columns: at, cell, generation, rank, the fields of `StepSample`, and tflops, mfu, hfu.
        """
        made = _Made()
        return _table([row for look in self.looks for row in _step_rows(look, made)], _STEP_COLUMNS)

    @property
    def looks(self) -> list[Sample]:
        """Return the kept Samples, oldest first: the last 600, or fewer if there are more than 50 ranks."""
        with self._lock:
            return list(self._looks)

    # --- recording

    def record(self, path: str | Path | None = None, *, rate: float | None = None) -> History:
        """Sample from now on until `stop`, whether or not a panel is open. New sessions are included.

        Args:
            path: A file to which every row is appended as a line of JSON, with the name of its table under "table".
            rate: Seconds between two samples, 0.25 to 60; None to leave it (1 at first).

        Raises:
            UsageError: The file can't be written, or the rate is out of range.
        """
        file = _File(Path(path)) if path is not None else None
        with self._lock:
            try:
                self._follow(rate)
            except UsageError:
                if file is not None:
                    file.close()
                raise
            self._recording = True
            if file is not None:
                self._close_file()
                self._file = file
        return self

    def stop(self) -> None:
        """Stop sampling, and close the file. What has been recorded is kept."""
        with self._lock:
            self._recording, self._monitor = False, None
            self._unsubscribe()
            self._close_file()

    def clear(self) -> None:
        """Forget what has been recorded. The file is left alone."""
        with self._lock:
            self._cells.clear()
            self._looks.clear()

    def _close_file(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _follow(self, rate: float | None = None) -> None:
        """Sample the notebook's session, or its own process while there is none."""
        from nbdist.client.costs.monitor import Monitor
        from nbdist.client.session.current import living_session

        monitor = Monitor.of(living_session())
        if rate is not None:
            monitor.rate = rate
        if monitor is self._monitor:
            return
        if rate is None and self._monitor is not None:
            monitor.rate = self._monitor.rate
        self._unsubscribe()
        self._monitor, self._unsubscribe = monitor, monitor.subscribe(lambda sample: None)

    # --- recording

    def cell_began(self, task: TaskRecord) -> None:
        """Note that something is about to run on ranks, perhaps of a new session."""
        with self._lock:
            if self._recording:
                self._follow()

    def cell_ended(self, task: TaskRecord) -> None:
        """Add what ran on ranks, unless it ran none of the user's code."""
        if task.runs_users_code:
            ranks = format_ranks(task.ranks)
            self._add_cell(_cell_row(task.started, task.number, task.kind, ranks, task.status, task.code))

    def end_own_cell(self, started: float, result: Any) -> None:
        """Add a cell that ran in the notebook's own process, unless it leaves no trace in the notebook."""
        if result is None or result.execution_count is None:
            return
        error = result.error_before_exec or result.error_in_exec
        status = "interrupted" if isinstance(error, KeyboardInterrupt) else "ok" if error is None else "error"
        self._add_cell(_cell_row(started, result.execution_count, "cell", _OWN, status, result.info.raw_cell))

    def _add_cell(self, row: Row) -> None:
        with self._lock:
            self._cells.append(row)
            self._write("cells", [row])

    def ranks_looked_at(self, sample: Sample) -> None:
        """Add a sample of ranks."""
        with self._lock:
            self._looks.append(sample)
            ranks = sum(len(look.ranks) for look in self._looks) if len(sample.ranks) * _LOOKS > _RANKS else 0
            while ranks > _RANKS and len(self._looks) > 1:
                ranks -= len(self._looks.popleft().ranks)
            if self._file is not None:
                self._write("samples", _sample_rows(sample))
                self._write("steps", _step_rows(sample, self._file.made))

    def _write(self, table: str, rows: Iterable[Row]) -> None:
        if self._file is not None:
            self._file.write(table, rows)

    def __repr__(self) -> str:
        with self._lock:
            looks, cells = len(self._looks), len(self._cells)
            hint = "" if looks or self._recording else " (a panel, or `nbdist.history().record()`, makes them)"
            file = f", {self._file}" if self._file is not None else ""
        return f"<history: {cells:,} cells, {looks:,} looks at ranks{hint}{file}; .cells, .samples, .steps>"


class _File:
    """JSON lines, each written whole and at once, so that a kernel that is killed leaves whole lines."""

    def __init__(self, path: Path) -> None:
        self._path = path.expanduser()
        self._why = ""
        self.made = _Made()
        try:
            self._descriptor = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise UsageError(
                f"the history can't be written to {path}: {error.strerror}. Use a file in a folder that exists, "
                "for example `nbdist.history(path='run.jsonl')`"
            ) from None

    def write(self, table: str, rows: Iterable[Row]) -> None:
        lines = b"".join(msgspec.json.encode({"table": table, **row}) + b"\n" for row in rows)
        if self._why or not lines:
            return
        try:
            while lines:
                lines = lines[os.write(self._descriptor, lines) :]
        except OSError as error:
            self._why = f"no longer written to: {error.strerror}"
            with contextlib.suppress(OSError):
                print(f"nbdist: the history's file {self._path} is {self._why}", file=sys.stderr)

    def close(self) -> None:
        os.close(self._descriptor)

    def __str__(self) -> str:
        return f"in {self._path}" + (f" ({self._why})" if self._why else "")


# --- rows

_CELL_COLUMNS = ("at", "cell", "kind", "ranks", "seconds", "status", "code")
_LOOK_COLUMNS = ("at", "cell", "generation")
_RANK_COLUMNS = tuple(name for name in RankSample.__struct_fields__ if name not in ("step", "held"))
_GPU_COLUMNS = ("gpu_total", "gpu_used", "non_torch", "utilization", "temperature", "power", "throttled")
_NODE_COLUMNS = ("node_memory_total", "node_memory_used", "node_cpu")
_SAMPLE_COLUMNS = (*_LOOK_COLUMNS, *_RANK_COLUMNS, *_GPU_COLUMNS, *_NODE_COLUMNS)
_STEP_COLUMNS = (*_LOOK_COLUMNS, "rank", *StepSample.__struct_fields__, "tflops", "mfu", "hfu")

_CODE = 120  # characters
_OWN = "-1"  # the notebook's own process among ranks


def _cell_row(started: float, number: int, kind: str, ranks: str, status: str, code: str) -> Row:
    seconds = time.monotonic() - started
    first = next((line.strip()[:_CODE] for line in code.splitlines() if line.strip()), "")
    return dict(zip(_CELL_COLUMNS, (time.time() - seconds, number, kind, ranks, seconds, status, first), strict=True))


def _sample_rows(look: Sample) -> Iterator[Row]:
    nodes = {node.name: node for node in look.nodes}
    for rank in look.ranks:
        gpu, node = gpu_of(rank.gpu, look.nodes), nodes.get(rank.node)
        row: Row = {"at": look.at, "cell": look.cell, "generation": look.generation}
        row |= {name: getattr(rank, name) for name in _RANK_COLUMNS}
        row |= dict.fromkeys((*_GPU_COLUMNS, *_NODE_COLUMNS))
        if gpu is not None:
            row |= {"gpu_total": gpu.total, "gpu_used": gpu.used, "non_torch": non_torch(rank, gpu)}
            row |= {"utilization": gpu.utilization, "temperature": gpu.temperature, "power": gpu.power}
            row["throttled"] = ", ".join(gpu.throttled)
        if node is not None:
            row |= {"node_memory_total": node.memory_total, "node_memory_used": node.memory_used, "node_cpu": node.cpu}
        yield row


class _Made:
    """How many steps each rank had made at the last sample. Fresh ranks start again from 0."""

    def __init__(self) -> None:
        self._steps: dict[tuple[int, int], int] = {}

    def more(self, rank: RankSample, steps: int) -> bool:
        key = rank.rank, rank.pid
        before, self._steps[key] = self._steps.get(key, 0), steps
        return steps != before


def _step_rows(look: Sample, made: _Made) -> Iterator[Row]:
    for rank in look.ranks:
        step = rank.step
        if step is None or not made.more(rank, step.steps):
            continue
        row: Row = {"at": look.at, "cell": look.cell, "generation": look.generation, "rank": rank.rank}
        row |= {name: getattr(step, name) for name in StepSample.__struct_fields__}
        speed, hardware = _ratio(step.flops, step.seconds), _ratio(step.hardware_flops, step.seconds)
        row |= {"tflops": _ratio(speed, 1e12), "mfu": _ratio(speed, step.peak), "hfu": _ratio(hardware, step.peak)}
        yield row


def _ratio(part: float | None, whole: float | None) -> float | None:
    """Return part / whole; None also if a clock ran backwards."""
    if part is None or whole is None or not whole > 0:
        return None
    ratio = part / whole
    return ratio if math.isfinite(ratio) else None


def _table(rows: list[Row], columns: tuple[str, ...]) -> Any:
    try:
        import pandas
    except ImportError:
        return rows
    return pandas.DataFrame(rows, columns=list(columns))


of_notebook = History()


def history(path: str | Path | None = None, *, rate: float | None = None) -> History:
    """Return what has been recorded in this notebook: `.cells`, `.samples`, `.steps`.

    >>> nbdist.history(path="run.jsonl")  # from now on every row is also written to the file
    >>> nbdist.history().samples.groupby("rank")["peak"].max()

    Args:
        path: As in `History.record`, which is then called.
        rate: As in `History.record`.

    Raises:
        UsageError: As in `History.record`.
    """
    return of_notebook if path is None and rate is None else of_notebook.record(path, rate=rate)


def watch_cells(shell: Any) -> None:
    """Keep the cells of this notebook that start and end without a session, from now on."""
    from nbdist.client.session.current import living_session

    began: list[float] = []  # of the running cell, and of those that it runs

    def begin(info: object) -> None:
        began.append(time.monotonic() if living_session() is None and shells.in_cell() else math.inf)

    def end(result: Any) -> None:
        started = began.pop() if began else math.inf
        if not began and math.isfinite(started) and living_session() is None:
            of_notebook.end_own_cell(started, result)

    shell.events.register("pre_run_cell", begin)
    shell.events.register("post_run_cell", end)
