"""A profile of what one process does: torch's profiler around a piece of work, its trace on disk and a summary.

Owns the definitions of the summary's shares, and how traces of several ranks become one. Independent of cells.
"""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from nbdist.base import text

_COMMUNICATION = (
    *("gloo:", "nccl:", "nccldevkernel", "ncclkernel", "ncclsym", "rccl", "mpi:", "ucc:", "nvshmem", "memcpy ptop"),
    *("multimem_", "one_shot_", "two_shot_"),  # torch's symmetric memory
)
_COMMUNICATES_INSIDE = ("deep_ep::",)
_MARKER = b"USDT:"
_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
_TOP = 20  # operations that a summary keeps
_LARGEST_TRACE = 1 << 30  # bytes; to read a larger one would take many times that


class Operation(msgspec.Struct, frozen=True):
    """One kind of operation on one rank. Seconds; `own` is without the operations that it called."""

    name: str
    calls: int
    own: float
    total: float


class Summary(msgspec.Struct, frozen=True):
    """What one rank did while it was profiled.

    Attributes:
        rank: The rank.
        seconds: Wall time.
        device: "cpu", or "cuda" where kernels ran on a GPU: then the shares below are the GPU's.
        busy: Share of the time in which at least one operation ran, communication left aside.
        communication: Share in which a collective was under way, also where it was hidden behind operations.
        idle: Share in which neither was.
        operations: Those with the most own time.
        trace: File with this rank's events; empty if there is none.
        why: What went wrong, in words.
    """

    rank: int
    seconds: float
    device: str = "cpu"
    busy: float = 0.0
    communication: float = 0.0
    idle: float = 1.0
    operations: list[Operation] = []
    trace: str = ""
    why: str = ""


@contextlib.contextmanager
def profiled(folder: str, rank: int) -> Iterator[list[Summary]]:
    """Profile the body.

    Args:
        folder: Where the trace goes; empty: nothing is profiled.
        rank: Names this process in the trace.

    Yields:
        A list that holds the summary once the body has ended, also if it raised.
    """
    summaries: list[Summary] = []
    if not folder:
        yield summaries
        return
    import torch

    activities = [torch.profiler.ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    profiler = torch.profiler.profile(activities=activities)
    began = time.perf_counter()
    why = _start(profiler)
    try:
        yield summaries
    finally:
        seconds = time.perf_counter() - began
        summaries.append(Summary(rank, seconds, why=why) if why else _stop(profiler, Path(folder), rank, seconds))


def _start(profiler: Any) -> str:
    """Return why it did not start; empty: it did."""
    try:
        with _without_markers():
            profiler.start()
    except Exception as error:  # another profiler may be at work, or the driver may forbid it
        return f"torch's profiler did not start: {error}"
    return ""


def _stop(profiler: Any, folder: Path, rank: int, seconds: float) -> Summary:
    try:
        with _without_markers():
            profiler.stop()
        return _conclude(profiler, folder, rank, seconds)
    except Exception as error:  # the user's own profiler may have ended ours
        return Summary(rank, seconds, why=f"torch's profiler gave no trace: {error}")


@contextlib.contextmanager
def _without_markers() -> Iterator[None]:
    """Keep from stderr what torch's profiler writes there when it starts and stops; all else goes on."""
    kept = os.dup(2)
    caught = os.memfd_create("nbdist-stderr", os.MFD_CLOEXEC)
    os.dup2(caught, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.lseek(caught, 0, os.SEEK_SET)
        with os.fdopen(caught, "rb") as file, os.fdopen(kept, "wb") as stderr:
            stderr.writelines(line for line in file if not line.startswith(_MARKER))


def _conclude(profiler: Any, folder: Path, rank: int, seconds: float) -> Summary:
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        path = Path(scratch) / "trace.json"
        profiler.export_chrome_trace(str(path))
        if path.stat().st_size > _LARGEST_TRACE:
            why = f"the trace is larger than {text.size(_LARGEST_TRACE)}: profile fewer steps"
            return Summary(rank, seconds, why=why)
        trace = json.loads(path.read_bytes())
    events = trace["traceEvents"]
    base = int(trace.get("baseTimeNanoseconds", 0)) / 1000
    part = folder / f"rank{rank}.part"
    with part.open("wb") as file:
        for number, event in enumerate(_renamed(events, rank, base)):
            file.write((b",\n" if number else b"") + json.dumps(event).encode())
    return summarize(events, rank, seconds, str(part))


def _renamed(events: Iterable[dict[str, Any]], rank: int, base: float) -> Iterator[dict[str, Any]]:
    """Yield the events with their process named by its rank, on a clock that all ranks of a machine share."""
    arguments = {"process_name": {"name": f"rank {rank}"}, "process_sort_index": {"sort_index": rank}}
    for event in events:
        changed = dict(event)
        if "ts" in event:
            changed["ts"] = event["ts"] + base
        if event.get("name") in arguments:
            changed["args"] = arguments[event["name"]]
        yield changed


def summarize(events: Sequence[dict[str, Any]], rank: int, seconds: float, trace: str = "") -> Summary:
    """Return the summary of a rank's trace events, as Chrome's trace format has them (times in microseconds).

    Args:
        events: "X" events with name, cat, ts, dur and tid.
        rank: Whose they are.
        seconds: Wall time of the whole.
        trace: File that holds them.
    """
    whole = [event for event in events if event.get("ph") == "X" and event.get("dur") is not None]
    on_device = [event for event in whole if event.get("cat") in _DEVICE]
    work = on_device or [event for event in whole if event.get("cat") in ("cpu_op", "user_annotation")]
    exchanges = [_span(event) for event in work if _communicates(event)]
    others = [_span(event) for event in work if not _communicates(event) and not _waits(event)]
    wall = seconds * 1e6
    return Summary(
        rank=rank,
        seconds=seconds,
        device="cuda" if on_device else "cpu",
        busy=min(1.0, _covered(others) / wall),
        communication=min(1.0, _covered(exchanges) / wall),
        idle=max(0.0, 1.0 - _covered(others + exchanges) / wall),
        operations=_operations(work),
        trace=trace,
    )


def _communicates(event: dict[str, Any]) -> bool:
    name = str(event["name"]).lower()
    return name.startswith(_COMMUNICATION) or any(part in name for part in _COMMUNICATES_INSIDE)


def _waits(event: dict[str, Any]) -> bool:
    """Return whether it spans others without doing anything itself, so that time in it may be idle."""
    return event.get("cat") == "user_annotation"


def _span(event: dict[str, Any]) -> tuple[float, float]:
    return event["ts"], event["ts"] + event["dur"]


def _covered(spans: Iterable[tuple[float, float]]) -> float:
    """Return the length of the union."""
    length, end = 0.0, float("-inf")
    for first, last in sorted(spans):
        length += max(0.0, last - max(first, end))
        end = max(end, last)
    return length


def _operations(events: Sequence[dict[str, Any]]) -> list[Operation]:
    """Return totals by name; an operation's own time is what operations within it, on the same thread, leave."""
    calls: defaultdict[str, int] = defaultdict(int)
    own: defaultdict[str, float] = defaultdict(float)
    total: defaultdict[str, float] = defaultdict(float)
    open_events: defaultdict[Any, list[tuple[float, str]]] = defaultdict(list)
    for event in sorted(events, key=lambda event: (event["ts"], -event["dur"])):
        name, (first, last) = str(event["name"]), _span(event)
        stack = open_events[event.get("tid")]
        while stack and stack[-1][0] <= first:
            stack.pop()
        if stack:
            own[stack[-1][1]] -= event["dur"]
        stack.append((last, name))
        calls[name] += 1
        own[name] += event["dur"]
        total[name] += event["dur"]
    found = [Operation(name, calls[name], own[name] / 1e6, total[name] / 1e6) for name in calls]
    return sorted(found, key=lambda operation: -operation.own)[:_TOP]


def merge(summaries: Iterable[Summary], target: Path) -> int:
    """Write one trace of all ranks, for https://ui.perfetto.dev or chrome://tracing. The ranks' parts are removed.

    Args:
        summaries: Of the ranks.
        target: The file; gzipped where its name ends in .gz. It is whole, or not there.

    Returns:
        Its size, bytes.
    """
    parts = [Path(summary.trace) for summary in summaries if summary.trace]
    unfinished = target.with_name(target.name + ".partial")
    try:
        with unfinished.open("wb") as raw, contextlib.ExitStack() as ends:
            compressed = target.suffix == ".gz"
            file = ends.enter_context(gzip.GzipFile("", "wb", 3, raw)) if compressed else raw
            file.write(b'{"displayTimeUnit": "ms", "traceEvents": [\n')
            for number, part in enumerate(parts):
                file.write(b",\n" if number else b"")
                file.write(part.read_bytes())
            file.write(b"\n]}\n")
        os.replace(unfinished, target)
    finally:
        unfinished.unlink(missing_ok=True)
        for part in parts:
            part.unlink(missing_ok=True)
    return target.stat().st_size
