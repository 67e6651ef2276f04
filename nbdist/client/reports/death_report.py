"""A file for each death of a rank: what ran, where the ranks were, memory, last lines, versions; to send with an issue.

It is written in a thread of its own, after the error is on its way. Of the environment only variables that are listed
here are in it.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib.metadata
import itertools
import os
import platform
import re
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from nbdist.base.checks import is_on
from nbdist.base.ranks import RankNames, describe_ranks
from nbdist.base.text import size
from nbdist.client.base.rank_memory import memory_of
from nbdist.client.base.results import CellResult
from nbdist.client.reports.flight import render
from nbdist.client.reports.logs import CellLog
from nbdist.errors import NbdistError, RankError, RankFailure
from nbdist.wire.messages.output import LogPart
from nbdist.wire.questions.question import A, NoAnswer, Question
from nbdist.wire.questions.stopping import Flight, GetFlight

VARIABLE = "NBDIST_REPORTS"  # a folder, or 0 for no reports
_KEPT = 20  # reports
_LINES = 50  # of what each rank printed last
_COLLECTIVES = 20
_SYSTEM_LINES = 20
_ANSWER = 2.0  # seconds for dmesg, and for ranks to report their last collectives
_LATER = 0.2  # seconds until the error is shown, which nothing is to delay
_AT_MOST = 5.0  # seconds that the end of a session or process waits for a report
HURRY = 0.5  # ... that an end waits which somebody has asked for
_SYSTEM = re.compile(r"out of memory|oom[-_]kill|killed process|segfault|Xid|machine check", re.IGNORECASE)
_ANSI = re.compile(r"\x1b\[[0-9;]*m")
_PACKAGES = ("nbdist", "torch", "numpy", "ipython", "ipykernel", "pyzmq", "msgspec")
# By name, not by what they lack: a secret may have any name.
_SHOWN = {
    "CONDA_DEFAULT_ENV",
    "LD_LIBRARY_PATH",
    "LD_PRELOAD",
    "MALLOC_ARENA_MAX",
    "MKL_NUM_THREADS",
    "OMP_NUM_THREADS",
    "PYTHONHASHSEED",
    "PYTHONPATH",
    "PYTORCH_ALLOC_CONF",
    "PYTORCH_CUDA_ALLOC_CONF",
    "SLURM_JOB_NUM_NODES",
    "TORCH_CPP_LOG_LEVEL",
    "TORCH_DISTRIBUTED_DEBUG",
    "TORCH_FR_BUFFER_SIZE",
    "TORCH_LOGS",
    "VIRTUAL_ENV",
}
_SHOWN_PREFIXES = ("CUBLAS_", "CUDA_", "GLOO_", "NCCL_", "TORCH_NCCL_")

_counter = itertools.count(1)
_writing: dict[threading.Thread, threading.Event] = {}  # each with what has it begin at once


class Witness(Protocol):
    """What a report asks.

    Attributes:
        places: How to name ranks.
    """

    places: RankNames

    def ask(self, ranks: Sequence[int], question: Question[A], *, timeout: float) -> dict[int, A | NoAnswer]:
        """Ask the ranks, and return the answers that arrive within `timeout` seconds."""

    def read_log(self, **question: Any) -> LogPart:
        """Read part of what was printed; the arguments are the fields of a ReadLog."""

    def doing(self) -> list[str]:
        """Return what ranks run, in words."""


@dataclass(frozen=True)
class Scene:
    """What is known when a rank has died in a cell.

    Attributes:
        title: The cell, in words.
        code: What it ran.
        result: Its output, by rank.
        failures: How each rank ended; those that are not there finished.
        waits: What ranks waited in, as last reported.
    """

    title: str
    code: str
    result: CellResult
    failures: dict[int, RankFailure]
    waits: dict[int, str]


def new_path() -> Path | None:
    """Return the file for the next report; None if there are to be none. Touches no disk."""
    given = os.environ.get(VARIABLE, "")
    if not is_on(VARIABLE, default=True):
        return None
    state = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state")
    folder = Path(given).expanduser().absolute() if given else state / "nbdist" / "reports"
    stamp = time.strftime("%Y%m%d-%H%M%S")
    return folder / f"death-{stamp}-{os.getpid()}-{next(_counter)}.txt"


def write_later(path: Path, source: Witness, scene: Scene, error: RankError, failed: Callable[[str], None]) -> None:
    """Write a report in the background.

    Args:
        path: The file, which is readable by its owner only.
        source: Asked for what is not known yet.
        scene: What happened.
        error: The error that the user sees.
        failed: Called with a line of text if it can't be written.
    """
    at_once = threading.Event()

    def write() -> None:
        at_once.wait(_LATER)
        try:
            _write(path, source, scene, error.report)
        except OSError as obstacle:
            failed(f"the report could not be written: {obstacle}. `{VARIABLE}=FOLDER` in the environment moves it")
        finally:
            del _writing[threading.current_thread()]

    thread = threading.Thread(target=write, name="nbdist-report", daemon=True)
    _writing[thread] = at_once
    thread.start()


@atexit.register
def finish(at_most: float = _AT_MOST) -> None:
    """Have the reports written whose time has not come, and wait for that, but not long."""
    waiting = dict(_writing)
    for at_once in waiting.values():
        at_once.set()
    deadline = time.monotonic() + at_most
    for thread in waiting:
        thread.join(max(0.0, deadline - time.monotonic()))


def _write(path: Path, source: Witness, scene: Scene, error: str) -> None:
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with open(descriptor, "w", encoding="utf-8", errors="backslashreplace") as file:
        for title, text in _sections(source, scene, error):
            file.write(f"== {title}\n\n{_ANSI.sub('', text).strip()}\n\n")
            file.flush()  # what comes next may take its time, or not come
    _remove_old(path.parent)


def _remove_old(folder: Path) -> None:
    for old in sorted(folder.glob("death-*.txt"))[:-_KEPT]:
        old.unlink(missing_ok=True)


def _sections(source: Witness, scene: Scene, error: str) -> Iterator[tuple[str, str]]:
    """Yield titles and texts, what is known already first."""
    names = source.places
    yield "error", f"{time.strftime('%Y-%m-%d %H:%M:%S %z')}\n{error}"
    yield scene.title, scene.code
    yield "other cells that run", "\n".join(source.doing()) or "none"
    yield "how each rank ended, and where it was", _ends(scene, names)
    yield "machine of the notebook", _machine()
    yield "versions", "\n".join(f"{name} {version}" for name, version in _versions())
    yield "environment (only variables that hold no secrets)", _environment()
    yield "system log (dmesg)", _system_log()
    living = [rank for rank in scene.result if rank not in _dead(scene)]
    yield "memory of the surviving ranks", _memory(source, living)
    yield "last collectives of the surviving ranks", _collectives(source, living)
    yield f"last {_LINES} lines that each rank printed in this cell", _last_lines(source, scene)


def _dead(scene: Scene) -> list[int]:
    return [rank for rank, failure in scene.failures.items() if failure.kind == "died"]


def _ends(scene: Scene, names: RankNames) -> str:
    lines = []
    for rank in scene.result:
        failure = scene.failures.get(rank)
        if failure is None:
            lines.append(f"{names.describe([rank])}: finished")
            continue
        how = failure.text if failure.kind == "died" else f"{failure.name}: {failure.text}".rstrip(": ")
        lines.append(f"{names.describe([rank])}: {failure.kind}, {how}")
        if rank in scene.waits:
            lines.append(f"    {scene.waits[rank]}")
        lines += [f"    {line}" for line in failure.traceback.strip().splitlines()]
    return "\n".join(lines)


def _machine() -> str:
    lines = [platform.platform(), f"{os.cpu_count()} cores, load {' '.join(f'{load:.1f}' for load in os.getloadavg())}"]
    with contextlib.suppress(OSError):
        wanted = ("MemTotal", "MemAvailable", "SwapFree", "Shmem:")
        lines += [line for line in Path("/proc/meminfo").read_text().splitlines() if line.startswith(wanted)]
    for name in ("memory.max", "memory.current", "memory.events"):
        with contextlib.suppress(OSError):
            lines.append(f"cgroup {name}: {' '.join(Path('/sys/fs/cgroup', name).read_text().split())}")
    with contextlib.suppress(OSError):
        lines.append(Path("/proc/driver/nvidia/version").read_text().splitlines()[0])
    return "\n".join(lines)


def _versions() -> Iterator[tuple[str, str]]:
    yield "Python", platform.python_version()
    for name in _PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            yield name, importlib.metadata.version(name)


def _environment() -> str:
    shown = {name: value for name, value in os.environ.items() if name in _SHOWN or name.startswith(_SHOWN_PREFIXES)}
    return "\n".join(f"{name}={value}" for name, value in sorted(shown.items())) or "none of them is set"


def _system_log() -> str:
    try:
        done = subprocess.run(["dmesg"], capture_output=True, text=True, errors="replace", timeout=_ANSWER, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"can't be read: {error}"
    if done.returncode:
        return f"can't be read: {done.stderr.strip()}"
    found = [line for line in done.stdout.splitlines() if _SYSTEM.search(line)]
    return "\n".join(found[-_SYSTEM_LINES:]) or "nothing of memory that ran out, of crashes, or of GPUs"


def _memory(source: Witness, ranks: Sequence[int]) -> str:
    found = memory_of(source, ranks)
    lines = []
    for rank in ranks:
        held = found.get(rank)
        if held is None:
            lines.append(f"rank {rank}: no answer")
            continue
        gpu = f", GPU {size(held.allocated)} allocated, {size(held.reserved)} reserved" if held.allocated else ""
        if held.by_driver is not None:
            gpu = f", GPU {size(held.by_driver)} by the driver's count"
        lines.append(f"rank {rank}: {size(held.private)} private{gpu}")
    return "\n".join(lines) or "none lives"


def _collectives(source: Witness, ranks: Sequence[int]) -> str:
    answers = source.ask(ranks, GetFlight(_COLLECTIVES), timeout=_ANSWER) if ranks else {}
    flights = {rank: flight for rank, flight in answers.items() if isinstance(flight, Flight) and flight.recorded}
    return render(flights, _COLLECTIVES, source.places) if flights else "none is recorded"


def _last_lines(source: Witness, scene: Scene) -> str:
    try:
        return "".join(CellLog(source.read_log, scene.result).lines(list(scene.result), _LINES))
    except NbdistError as error:
        return f"{describe_ranks(list(scene.result))}: {error}"
