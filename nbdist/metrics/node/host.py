"""Memory and processors of this machine, or of the container that this process may use, and of this process."""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

_CGROUPS = Path("/sys/fs/cgroup")
_OWN_CGROUPS = Path("/proc/self/cgroup")
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


def anonymous_memory() -> int:
    """Return the bytes that this process holds in memory and that no file backs. Costs microseconds."""
    resident, shared = Path("/proc/self/statm").read_text().split()[1:3]
    return (int(resident) - int(shared)) * _PAGE


def private_memory() -> int:
    """Return the bytes that only this process holds, including shared pages it has written. May take a while.

    The kernel walks all pages, under a lock that who maps memory waits for.
    """
    with open("/proc/self/smaps_rollup") as file:
        fields = (line.split() for line in file)
        return 1024 * sum(int(parts[1]) for parts in fields if parts[0] in ("Private_Clean:", "Private_Dirty:"))


def _own_cgroups() -> Iterator[tuple[Path, _Files]]:
    """Yield the folders of this process's cgroups and of those around them. Not all can be seen from in a container."""
    try:
        lines = _OWN_CGROUPS.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        number, controllers, path = line.split(":", 2)
        if number == "0" or "memory" in controllers.split(","):
            root, files = (_CGROUPS, _V2) if number == "0" else (_CGROUPS / "memory", _V1)
            own = root / path.lstrip("/")
            for folder in (own, *own.parents):
                if folder.is_relative_to(root):
                    yield folder, files


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
