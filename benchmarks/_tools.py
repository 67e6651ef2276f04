"""What benchmarks share: rounds that let noise hit both sides, rows with units, processes' memory and time.

Independent of what is measured.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TypedDict

import psutil

ROOT = Path(__file__).resolve().parent.parent
MB = 1e6
ONCE = os.environ.get("NBDIST_BENCH_ONCE") == "1"  # whether this run only shows that the benchmarks work
_LOOK = 0.5  # seconds between two looks at what processes do
_WIDTH = 62  # of the first column

Measure = Callable[[], float]


def prepare() -> None:
    """Let this process and the kernels that it starts find nbdist and `testbed`, as they are here."""
    os.chdir(ROOT)
    sys.path.insert(0, str(ROOT))
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))


def gpu() -> str:
    """Return "cuda". Without a GPU say so and end; with NBDIST_GPU_REHEARSAL=1 return "cpu" instead."""
    import torch

    if torch.cuda.is_available():
        return "cuda"
    if os.environ.get("NBDIST_GPU_REHEARSAL"):
        return "cpu"
    print("no GPU")
    sys.exit(0)


def ranks_for_gpus() -> int:
    """Return as many ranks as there are GPUs, at least two: they share one."""
    import torch

    return max(2, torch.cuda.device_count())


def size(full: int, small: int) -> int:
    """Return a size or a number of rounds: `full`, or `small` where a run only shows that the benchmark works."""
    return small if ONCE else full


def timed(work: Callable[[], object]) -> Measure:
    """A measure that gives the seconds that the work takes."""

    def measure() -> float:
        began = time.perf_counter()
        work()
        return time.perf_counter() - began

    return measure


def rounds(count: int, measures: Mapping[str, Measure], warm_up: int = 0) -> dict[str, list[float]]:
    """Take all measures in turn, so that what disturbs this machine meanwhile disturbs each of them."""
    count, warm_up = size(count, 1), size(warm_up, min(warm_up, 1))
    samples: dict[str, list[float]] = {name: [] for name in measures}
    for number in range(-warm_up, count):
        for name, measure in measures.items():
            value = measure()
            if number >= 0:
                samples[name].append(value)
    return samples


def header(title: str) -> None:
    print(f"{title:<{_WIDTH}}{'median':>10}   {'10 % to 90 %':<20}{'ratio':>8}  of what", flush=True)


def row(
    what: str,
    samples: Sequence[float],
    unit: str = "s",
    *,
    over: tuple[str, float | Sequence[float]] | None = None,
    at_least: float = 0.0,
    at_most: float | None = None,
) -> None:
    """One line: median, spread and the ratio to a limit or to another measure of the same rounds.

    Args:
        unit: "s", "MB" or "%" of a core.
        over: Name and value of what the ratio is to; a list is taken round by round.
        at_least: What the ratio should reach, if `at_most` is given.
        at_most: What the ratio should not exceed.
    """
    spread = f"{show(quantile(samples, 0.1), unit)} to {show(quantile(samples, 0.9), unit)}" if len(samples) > 1 else ""
    line = f"{what:<{_WIDTH}}{show(statistics.median(samples), unit):>10}   {spread:<20}"
    if over is not None:
        name, base = over
        ratio = ratio_to(samples, base)
        line += f"{ratio:>8.2f}  x {name}"
        if isinstance(base, (int, float)):
            line += f" of {show(base, unit)}"
        if at_most is not None:
            low = f"at least {at_least:g}, " if at_least else ""
            line += f", {low}at most {at_most:.3g}: {'kept' if at_least <= ratio <= at_most else 'MISSED'}"
    print(line.rstrip(), flush=True)


def ratio_to(samples: Sequence[float], base: float | Sequence[float]) -> float:
    if isinstance(base, (int, float)):
        return statistics.median(samples) / base
    return statistics.median(mine / other for mine, other in zip(samples, base, strict=True))


class Limit(TypedDict, total=False):
    """Arguments of `row`."""

    over: tuple[str, float]
    at_most: float


def limit(value: float) -> Limit:
    """Arguments of `row` for a budget in the row's own unit."""
    return {"over": ("the budget", value), "at_most": 1.0}


def quantile(samples: Sequence[float], fraction: float) -> float:
    ordered = sorted(samples)
    return ordered[min(len(ordered) - 1, round(fraction * (len(ordered) - 1)))]


def show(value: float, unit: str) -> str:
    if unit != "s":
        return f"{value:.0f} {unit}" if abs(value) >= 100 else f"{value:.2g} {unit}"
    if abs(value) < 1e-3:
        return f"{value * 1e6:.0f} µs"
    return f"{value * 1e3:.3g} ms" if abs(value) < 1 else f"{value:.2f} s"


# --- processes


def session_processes(kernel: int) -> dict[str, psutil.Process]:
    """The processes below a kernel that has a session, by role."""
    controller = child(psutil.Process(kernel), "nbdist.controller")
    agent = child(controller, "nbdist.agent")
    return {
        "kernel": psutil.Process(kernel),
        "controller": controller,
        "agent": agent,
        "template": child(agent, "nbdist.agent.forks.template"),
    }


def child(parent: psutil.Process, word: str) -> psutil.Process:
    """The child of a process whose command line has a word."""
    return next(child for child in parent.children() if word in " ".join(child.cmdline()))


def wait_until_quiet(processes: Sequence[psutil.Process], limit: float = 60.0) -> None:
    """Until these processes take less than 2 % of a core, and not because others leave them none."""
    deadline = time.monotonic() + limit
    before = -1.0
    while (now := sum(map(processor_time, processes))) - before > 0.02 * _LOOK or _want_a_core(processes):
        if time.monotonic() > deadline:
            raise TimeoutError(f"still busy after {limit:g} s")
        before = now
        time.sleep(_LOOK)


def _want_a_core(processes: Sequence[psutil.Process]) -> bool:
    return any(process.status() == psutil.STATUS_RUNNING for process in processes)


def processor_time(process: psutil.Process) -> float:
    """Seconds of processor time that a process has used, to the nanosecond."""
    total = 0
    for task in Path(f"/proc/{process.pid}/task").iterdir():
        total += int((task / "schedstat").read_text().split()[0])
    return total / 1e9


def shares(processes: Mapping[str, psutil.Process], seconds: float) -> dict[str, float]:
    """What each takes of a core in the next seconds, in percent."""
    before = {role: processor_time(process) for role, process in processes.items()}
    time.sleep(seconds)
    return {role: (processor_time(process) - before[role]) / seconds * 100 for role, process in processes.items()}


def memory(pid: int) -> dict[str, float]:
    """Private memory and the proportional share of all (PSS), in bytes."""
    fields = {}
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]:
        name, value, _ = line.split()
        fields[name.rstrip(":")] = 1024.0 * int(value)
    return {"private": fields["Private_Clean"] + fields["Private_Dirty"], "pss": fields["Pss"]}


@contextmanager
def peak_memory(pid: int) -> Iterator[Callable[[], float]]:
    """Inside, a function that says by how many bytes the process has grown at most since the beginning."""
    Path(f"/proc/{pid}/clear_refs").write_text("5")  # the peak starts anew from here
    start = _status(pid, "VmRSS")
    yield lambda: _status(pid, "VmHWM") - start


def _status(pid: int, name: str) -> float:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return 1024.0 * int(line.split()[1])
    raise KeyError(name)
