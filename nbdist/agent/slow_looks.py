"""Looks at the processes of this node's ranks that take their time: memory, and native stacks by py-spy.

Each runs in a thread of its own, so that the agent's loop never waits.
"""

from __future__ import annotations

import os
import queue
import re
import shutil
import subprocess
import sysconfig
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from nbdist.metrics.node import device, host
from nbdist.wire.questions.knowing import ProcessMemory
from nbdist.wire.questions.question import NoAnswer
from nbdist.wire.questions.questions import Answer, AnyAnswer, Ask
from nbdist.wire.questions.stopping import NativeStack

_AT_ONCE = 8


class SlowLooks:
    """Answers questions by looks at processes.

    Attributes:
        wake: Readable when `take` has something.
    """

    def __init__(self) -> None:
        self.wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._pool: ThreadPoolExecutor | None = None
        self._answers: queue.SimpleQueue[Answer] = queue.SimpleQueue()

    def begin(self, question: Ask, rank: int, look: Callable[[int], AnyAnswer], pid: int) -> None:
        """Take a look at a rank's process; `take` returns the answer."""
        if self._pool is None:
            self._pool = ThreadPoolExecutor(_AT_ONCE, "nbdist-looks")
        self._pool.submit(self._take_look, question, rank, look, pid)

    def take(self) -> list[Answer]:
        """Return the answers since the last time."""
        os.eventfd_read(self.wake)
        return [self._answers.get() for _ in range(self._answers.qsize())]

    def close(self) -> None:
        """Begin nothing more. What runs has to be ended."""
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)

    def _take_look(self, question: Ask, rank: int, look: Callable[[int], AnyAnswer], pid: int) -> None:
        try:
            found = look(pid)
        except Exception as error:  # nobody else would notice
            found = NoAnswer(f"{type(error).__name__}: {error}")
        self._answers.put(Answer(question.request, rank, found, question.asker))
        os.eventfd_write(self.wake, 1)


def memory_of(pid: int) -> ProcessMemory:
    """Return what a process holds, as the kernel and the GPUs' driver see it."""
    return ProcessMemory(host.private_memory(pid), by_driver=device.memory_by_driver(pid))


_DUMP_LIMIT = 60.0  # seconds: py-spy reads the symbols of all of torch's libraries
_MAIN_THREAD = re.compile(r'^Thread .*: "MainThread"\n((?: .*\n?)*)', re.MULTILINE)
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
_REFUSED = re.compile(r"permission denied|operation not permitted", re.IGNORECASE)


class NativeStacks:
    """Looks at the native stacks of processes, in any number of threads."""

    def __init__(self) -> None:
        self._programs: set[int] = set()

    @property
    def pids(self) -> set[int]:
        """The processes of py-spy."""
        return set(self._programs)

    def look(self, pid: int) -> NativeStack:
        """Return the stack of a process, or what keeps py-spy from it."""
        found = self.dump(pid, "--native")
        return found if isinstance(found, NativeStack) else _read(found)

    def dump(self, pid: int, *flags: str) -> str | NativeStack:
        """Return what `py-spy dump` prints of a process, or what keeps it from that."""
        try:
            return self._dump(pid, *flags)
        except Exception as error:  # the look was asked for: its failure is the answer
            return NativeStack(obstacle="other", text=f"{type(error).__name__}: {error}")

    def _dump(self, pid: int, *flags: str) -> str | NativeStack:
        folders = [sysconfig.get_path("scripts"), os.environ.get("PATH", "")]
        program = shutil.which("py-spy", path=os.pathsep.join(folders))
        if program is None:
            return NativeStack(obstacle="missing")
        keywords: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "stdin": subprocess.DEVNULL}
        command = [program, "dump", *flags, "--pid", str(pid)]
        with subprocess.Popen(command, text=True, errors="replace", **keywords) as process:
            self._programs.add(process.pid)
            try:
                output, errors = process.communicate(timeout=_DUMP_LIMIT)
            except subprocess.TimeoutExpired:
                process.kill()
                return NativeStack(obstacle="late", text=f"{_DUMP_LIMIT:.0f} s")
            finally:
                self._programs.discard(process.pid)
        if _REFUSED.search(errors):
            return NativeStack(obstacle="refused")
        return _failed(errors) if process.returncode else output


def _read(output: str) -> NativeStack:
    found = _MAIN_THREAD.search(_COLOURS.sub("", output))  # a notebook's environment asks for colors
    if found is None:
        return _failed("")
    return NativeStack([line.strip() for line in reversed(found[1].splitlines())])


def _failed(errors: str) -> NativeStack:
    what = next((line for line in errors.splitlines() if line.strip()), "it gave no reason")
    return NativeStack(obstacle="other", text=what)
