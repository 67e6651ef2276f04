"""Memory and processors of this machine, or of the container that this process may use, and of this process."""

from __future__ import annotations

import contextlib
import ctypes
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

CGROUPS = Path("/sys/fs/cgroup")
OWN_CGROUPS = Path("/proc/self/cgroup")
_PAGE = os.sysconf("SC_PAGE_SIZE")


class _Files(NamedTuple):
    """What a cgroup calls its limit, its use, and the part of its use that is given back when it is needed."""

    limit: str
    used: str
    cached: str


_V1 = _Files("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_V2 = _Files("memory.max", "memory.current", "inactive_file")


def memory() -> tuple[int, int]:
    """Return memory in all, and in use so that nobody else can have it. Bytes.

    In a container, or a job of a cluster, its own limit and use count: those of the cgroup with the smallest limit.
    """
    import psutil

    whole = psutil.virtual_memory()
    found = int(whole.total), int(whole.total - whole.available)
    for folder, files in _own_cgroups():
        with contextlib.suppress(OSError, ValueError):
            limit = int((folder / files.limit).read_text())  # "max", or more than there is, where there is none
            if limit < found[0]:
                cached = _field(folder / "memory.stat", files.cached)
                found = limit, max(0, int((folder / files.used).read_text()) - cached)
    return found


def busy_cores() -> float:
    """Share of the machine's cores that were busy since this thread's last call; its first one means nothing."""
    import psutil

    return float(psutil.cpu_percent(interval=None)) / 100


def cores() -> int:
    """Return how many cores this process may use at once: those it is bound to, or the quota of its container."""
    found = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    for folder in _own_cgroup_folders("cpu"):
        with contextlib.suppress(OSError, ValueError):
            quota, period = _cpu_quota(folder)
            if quota > 0:  # -1 where there is none
                found = min(found, max(1, quota // period))
    return found


def _cpu_quota(folder: Path) -> tuple[int, int]:
    """Return the microseconds of processor time in each period, and the period; ValueError where there is no limit."""
    if (folder / "cpu.max").exists():
        quota, period = (folder / "cpu.max").read_text().split()  # "max" where there is none
        return int(quota), int(period)
    return int((folder / "cpu.cfs_quota_us").read_text()), int((folder / "cpu.cfs_period_us").read_text())


class ProcessorUse:
    """How many cores this process keeps busy, between two looks."""

    def __init__(self) -> None:
        self._last = _Look.now()

    def look(self) -> float | None:
        """Return the cores since the last look, on average; None if that was a moment ago, or before a fork."""
        before, self._last = self._last, _Look.now()
        wall = self._last.at - before.at
        if wall <= 0 or self._last.pid != before.pid:  # a fork's processor time begins at 0
            return None
        return (self._last.used - before.used) / wall


class _Look(NamedTuple):
    at: float
    used: float
    pid: int

    @classmethod
    def now(cls) -> _Look:
        return cls(time.monotonic(), time.process_time(), os.getpid())


def anonymous_memory() -> int:
    """Return the bytes that this process holds in memory and that no file backs. Costs microseconds."""
    resident, shared = Path("/proc/self/statm").read_text().split()[1:3]
    return (int(resident) - int(shared)) * _PAGE


def private_memory(pid: int | None = None) -> int:
    """Return the bytes that only a process holds, including shared pages it has written. May take a while.

    The kernel walks all pages, under a lock that who maps memory waits for.

    Args:
        pid: The process; None: this one.

    Raises:
        OSError: It has ended, or the system does not let this process look.
    """
    with open(f"/proc/{pid or 'self'}/smaps_rollup") as file:
        fields = (line.split() for line in file)
        return 1024 * sum(int(parts[1]) for parts in fields if parts[0] in ("Private_Clean:", "Private_Dirty:"))


def _own_cgroups() -> Iterator[tuple[Path, _Files]]:
    """Yield the folders of this process's cgroups, and what their files are called."""
    for folder in _own_cgroup_folders("memory"):
        yield folder, _V1 if folder.is_relative_to(CGROUPS / "memory") else _V2


def _own_cgroup_folders(controller: str) -> Iterator[Path]:
    """Yield the folders of this process's cgroups and of those around them. Not all can be seen from in a container."""
    try:
        lines = OWN_CGROUPS.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        number, controllers, path = line.split(":", 2)
        if number == "0" or controller in controllers.split(","):
            root = CGROUPS if number == "0" else CGROUPS / controller
            own = root / path.lstrip("/")
            yield from (folder for folder in (own, *own.parents) if folder.is_relative_to(root))


def _field(path: Path, name: str) -> int:
    for line in path.read_text().splitlines():
        key, _, value = line.partition(" ")
        if key == name:
            return int(value)
    return 0


def trim_malloc() -> None:
    """Have malloc give back what it keeps."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
