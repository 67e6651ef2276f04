"""Where the time of an empty cell goes: each hop, wake-up and process on the way to the rank that is the last to end.

Knows the processes of a session by what they note of themselves (`_events`), nothing of their code.
"""

from __future__ import annotations

import bisect
import os
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path

import _tools
from _events import EVENT, SENDS, SENT, WAKES, Events

_CELLS = 300
_WARM_UP = 30
_HERE = Path(__file__).parent
_PROGRAM = "import _events; _events.Events({folder!r})"  # of each Python that is started

Span = tuple[int, int]


def trace(counts: Iterable[int]) -> None:
    """Print the way of an empty cell, for each number of ranks."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "sitecustomize.py").write_text(_PROGRAM.format(folder=folder))  # Python imports it as it starts
        os.environ["PYTHONPATH"] = os.pathsep.join([folder, os.environ["PYTHONPATH"], str(_HERE)])
        events = Events(folder)
        for count in counts:
            _print_way(count, *_run(count, Path(folder)))
        events.end()


def _print_way(count: int, cells: list[Span], logs: dict[str, _Log]) -> None:
    ways = [_way(began, ended, logs) for began, ended in cells]
    _tools.header(f"way of one empty cell, {count} ranks")
    for name in ways[0]:
        _tools.row(name, [way[name] for way in ways])
    _tools.row("together", [(ended - began) / 1e9 for began, ended in cells])
    for role in ("controller", "agent", "rank 0"):
        wakes, sends = (_per_cell(logs[role], what, cells) for what in (WAKES, SENT))
        print(f"{role}: wakes up {wakes:.1f} times, sends {sends:.1f} times", flush=True)


class _Log:
    """What one process has noted, by kind, in order."""

    def __init__(self, folder: Path, pid: int) -> None:
        self._times: defaultdict[int, list[int]] = defaultdict(list)
        for at, what in sorted(EVENT.iter_unpack((folder / str(pid)).read_bytes())):
            self._times[what].append(at)

    def first(self, what: int, since: int) -> int:
        times = self._times[what]
        return times[bisect.bisect_left(times, since)]

    def last(self, what: int, until: int) -> int:
        times = self._times[what]
        return times[bisect.bisect_right(times, until) - 1]

    def count(self, what: int, since: int, until: int) -> int:
        times = self._times[what]
        return bisect.bisect_right(times, until) - bisect.bisect_left(times, since)


def _run(count: int, folder: Path) -> tuple[list[Span], dict[str, _Log]]:
    """Run cells; return when each began and ended, in nanoseconds, and what the processes have noted meanwhile."""
    from nbdist.client.session.session import Session

    cells = []
    with Session(count) as session:
        for number in range(-_WARM_UP, _tools.size(_CELLS, 3)):
            began = time.monotonic_ns()
            session.run("pass")
            if number >= 0:
                cells.append((began, time.monotonic_ns()))
        pids = {name: process.pid for name, process in _tools.session_processes(os.getpid()).items()}
        pids |= {f"rank {row['rank']}": row["pid"] for row in session.status()}
        return cells, {name: _Log(folder, pid) for name, pid in pids.items()}


def _way(began: int, ended: int, logs: dict[str, _Log]) -> dict[str, float]:
    """Return the seconds of each part of a cell's way, from its beginning to its end."""
    client, controller, agent = logs["kernel"], logs["controller"], logs["agent"]
    ranks = [log for name, log in logs.items() if name.startswith("rank ")]
    sent = client.first(SENT, began)
    heard = controller.first(WAKES, sent)
    rank = max(ranks, key=lambda log: log.first(SENDS, sent))
    at_rank = rank.first(WAKES, sent)
    done = rank.first(SENDS, at_rank)
    told = client.last(WAKES, ended)
    delivers = controller.last(SENDS, told)
    back = controller.last(WAKES, delivers)
    reported = agent.last(SENDS, back)
    marked = agent.last(WAKES, reported)
    passed_on = controller.last(SENDS, at_rank)
    stops = {
        "client: run() until it is sent": sent,
        "  to the controller": heard,
        "controller: until it is sent to the rank": passed_on,
        "  to the rank": at_rank,
        "rank: until it has ended": done,
        "  to the agent": marked,
        "agent: until it is sent": reported,
        "  to the controller, back": back,
        "controller: until it is sent to the client": delivers,
        "  to the client": told,
        "client: until run() returns": ended,
    }
    way, before = {}, began
    for name, at in stops.items():
        way[name], before = (at - before) / 1e9, at
    return way


def _per_cell(log: _Log, what: int, cells: Sequence[Span]) -> float:
    return statistics.mean(log.count(what, began, ended) for began, ended in cells)
