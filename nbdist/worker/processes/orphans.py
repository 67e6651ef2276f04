"""Orphans that a rank has adopted, so that they are found when it dies: nobody waits for them, so they are reaped here.

The rank's own children are left to whoever started them, and would miss their exit codes: `subprocess`,
`multiprocessing`, callers of `os.fork`. The kernel does not tell adopted children from others.
"""

from __future__ import annotations

import contextlib
import gc
import multiprocessing.process
import os
import subprocess
import threading
from pathlib import Path

_ANY_ENDED = os.WEXITED | os.WNOHANG | os.WNOWAIT


class Orphans:
    """The adopted children of this process. Made once, before anything of the user's runs."""

    def __init__(self) -> None:
        self._forking = threading.local()
        self._own: set[int] = set()
        self._ended: set[int] = set()
        os.register_at_fork(before=self._before_fork, after_in_parent=self._after_fork)

    def reap(self) -> None:
        """Reap the orphans that had ended before the last call already. Costs a system call where there are none.

        Not at once: code in C may be about to wait for a child of its own.
        """
        try:
            if os.waitid(os.P_ALL, 0, _ANY_ENDED) is None:
                return
        except ChildProcessError:
            return
        children = _children()
        ended = {pid for pid in children if _has_ended(pid)}
        self._own &= children
        doomed = (ended & self._ended) - self._own
        if doomed:
            self._own |= doomed & _awaited()
        for pid in doomed - self._own:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
        self._ended = ended

    def _before_fork(self) -> None:
        self._forking.children = _children()

    def _after_fork(self) -> None:
        self._own |= _children() - self._forking.children


def _awaited() -> set[int]:
    """Return children that an object of Python's will wait for."""
    processes = [found for found in gc.get_objects() if issubclass(type(found), subprocess.Popen)]
    processes += getattr(multiprocessing.process, "_children", ())
    processes += getattr(subprocess, "_active", ())
    return {pid for process in processes if isinstance(pid := getattr(process, "pid", None), int)}


def _children() -> set[int]:
    found: set[int] = set()
    for task in Path("/proc/self/task").glob("*/children"):
        with contextlib.suppress(OSError):  # the thread has ended
            found.update(map(int, task.read_text().split()))
    return found


def _has_ended(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    return False
