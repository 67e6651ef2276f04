"""Threads of this process that its forks will lack: the user's own, and the thread pools of native libraries.

Only inspects. Threads of IPython, its kernel, zmq and nbdist don't count: ranks don't need them.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections import Counter
from pathlib import Path

from nbdist.base.text import counted

_OURS = ("IPython", "ipykernel", "nbdist", "tornado", "tqdm", "traitlets", "zmq")
# Their names, or the start or end of them, for threads of Python's own class.
_NAMES = ("IOPub", "Heartbeat", "Control", "Shell channel")
_BEGINNINGS = ("nbdist-", "Subshell", "IPythonHistorySavingThread")
_END = "(_watch_pipe_fd)"
# Libraries whose thread pool a fork lacks, so that the next parallel region there waits forever.
_POOLS = {"libgomp": "OpenMP", "libiomp": "OpenMP", "libomp": "OpenMP", "libtbb": "TBB"}


def describe_threads() -> str:
    """Describe the threads: "the thread 'prefetch' and 3 threads of OpenMP (libgomp)"; empty if there are none."""
    own = [
        repr(thread.name)
        for thread in threading.enumerate()
        if thread is not threading.main_thread() and not _is_usual(thread)
    ]
    parts = [f"the thread{'s' if len(own) > 1 else ''} {', '.join(own)}"] if own else []
    for library, count in sorted(_pools().items()):
        parts.append(f"{counted(count, 'thread')} of {_POOLS[library]} ({library})")
    return " and ".join(parts)


def _is_usual(thread: threading.Thread) -> bool:
    name = thread.name
    by_name = name in _NAMES or name.startswith(_BEGINNINGS) or name.endswith(_END)
    return by_name or type(thread).__module__.partition(".")[0] in _OURS


def _pools() -> Counter[str]:
    """Count native threads by the library whose code they wait in."""
    found: Counter[str] = Counter()
    with contextlib.suppress(OSError, ValueError):  # this system does not report it
        regions = _code_regions()
        python = {thread.native_id for thread in threading.enumerate()}
        for thread in set(map(int, os.listdir("/proc/self/task"))) - python:
            found.update(_library(_program_counter(thread), regions))
    return found


def _code_regions() -> list[tuple[int, int, str]]:
    """Return the first address, last address, and name in `_POOLS` of each code region of these libraries."""
    regions = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        fields = line.split(maxsplit=5)
        name = next((name for name in _POOLS if os.path.basename(fields[-1]).startswith(name)), "")
        if name and "x" in fields[1]:
            first, last = (int(address, 16) for address in fields[0].split("-"))
            regions.append((first, last, name))
    return regions


def _program_counter(thread: int) -> int:
    """Return the address from which a waiting thread made its system call; 0 if it is running."""
    try:
        fields = Path(f"/proc/self/task/{thread}/syscall").read_text().split()
    except OSError:  # it has ended, or this system does not report it
        return 0
    return int(fields[-1], 16) if len(fields) > 1 else 0


def _library(address: int, regions: list[tuple[int, int, str]]) -> list[str]:
    return [name for first, last, name in regions if first <= address < last][:1]
