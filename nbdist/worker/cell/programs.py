"""Programs that a cell has started: Ctrl-C reaches them as it does where no ranks are, together with the cell.

Knows processes as the kernel lists them; independent of cells but when they began.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import NamedTuple

_HAS_NOT_EXECUTED = 0x40  # PF_FORKNOEXEC, linux/sched.h
_TICKS = os.sysconf("SC_CLK_TCK")


class _Program(NamedTuple):
    """What the kernel says about a process. `began`: in ticks since the machine has been up."""

    group: int
    executed: bool
    began: int


class Programs:
    """The programs that the running cell has started. What was started before it, and forked workers, are none."""

    def __init__(self) -> None:
        self._since = 0
        self._before: set[int] = set()
        self._sent: set[int] = set()

    def begin(self) -> None:
        """Begin a cell."""
        self._before = set(_children(os.getpid())) if _has_children() else set()  # a tick, 10 ms, can have two cells
        self._since = int(time.clock_gettime(time.CLOCK_BOOTTIME) * _TICKS)
        self._sent.clear()

    def to_interrupt(self, *, again: bool) -> list[int]:
        """Return those that are to get SIGINT.

        Args:
            again: Whether also those that had one: a second would end what they do about the first.
        """
        return [pid for pid in self._find() if again or pid not in self._sent]

    def interrupt(self, pids: list[int]) -> None:
        """Send SIGINT to these."""
        for pid in pids:
            self._sent.add(pid)
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGINT)

    def _find(self) -> Iterator[int]:
        group, workers = os.getpgrp(), _workers()
        unseen = list(_children(os.getpid()))
        while unseen:
            pid = unseen.pop()
            program = _look_at(pid)
            if program is None or pid in workers or not program.executed or self._is_older(pid, program):
                continue
            unseen += _children(pid)
            if program.group == group:  # else it has chosen to be out of reach of a terminal's Ctrl-C
                yield pid

    def _is_older(self, pid: int, program: _Program) -> bool:
        """Return whether it was there before the cell, as a child or as one that is adopted later."""
        return program.began < self._since or (program.began == self._since and pid in self._before)


def waits_in_system() -> bool:
    """Return whether `os.system` is under way: C then ignores SIGINT, which Python does not notice."""
    return signal.getsignal(signal.SIGINT) != signal.SIG_IGN and _is_ignored(signal.SIGINT)


def run_command(command: str, undisturbed: Callable[[], AbstractContextManager[None]]) -> int:
    """Run a shell command with the rank's own stdout and stderr. An interrupt ends the command and then the cell.

    Args:
        command: What the shell runs.
        undisturbed: Holds interrupts back.

    Returns:
        The exit code as subprocess has it.
    """
    shell = os.environ.get("SHELL") or None
    with undisturbed():  # what an interrupted `Popen` has started, nobody knows
        # A shell that is interrupted waits for its programs, and one that is killed leaves them: all are one group.
        process = subprocess.Popen(
            command, shell=True, executable=shell, stdin=subprocess.DEVNULL, start_new_session=True
        )
    try:
        return process.wait()
    except BaseException:  # an interrupt: the program must not outlive its cell
        _end_group(process)
        raise


def _end_group(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGINT)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(1)
        return
    os.killpg(process.pid, signal.SIGKILL)  # ours: it is not reaped yet
    process.wait()


def _is_ignored(number: int) -> bool:
    with contextlib.suppress(OSError, StopIteration):
        lines = Path("/proc/self/status").read_text().splitlines()
        ignored = next(line for line in lines if line.startswith("SigIgn:"))
        return bool(int(ignored.split()[1], 16) >> (number - 1) & 1)
    return False


def _has_children() -> bool:
    """Return whether this process has any: one call, where a list of them takes a file for each thread."""
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


def _children(pid: int) -> Iterator[int]:
    with contextlib.suppress(OSError):  # it has ended, or this kernel does not list children
        for task in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(OSError):
                yield from map(int, (task / "children").read_text().split())


def _look_at(pid: int) -> _Program | None:
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return None
    return _Program(int(fields[2]), not int(fields[6]) & _HAS_NOT_EXECUTED, int(fields[19]))


def _workers() -> set[int | None]:
    """Return what `multiprocessing` and torch's compiler have started as programs: they have to outlive the cell."""
    processes = sys.modules.get("multiprocessing.process")
    server = getattr(sys.modules.get("multiprocessing.forkserver"), "_forkserver", None)
    tracker = getattr(sys.modules.get("multiprocessing.resource_tracker"), "_resource_tracker", None)
    compilers = getattr(sys.modules.get("torch._inductor.async_compile"), "_pool_set", ())
    found = {child.pid for child in list(getattr(processes, "_children", ()))}
    found |= {getattr(getattr(compiler, "process", None), "pid", None) for compiler in list(compilers)}
    return found | {getattr(server, "_forkserver_pid", None), getattr(tracker, "_pid", None)}
