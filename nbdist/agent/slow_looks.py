"""Looks at the processes of this node's ranks that take their time, in threads: the agent's loop waits for none."""

from __future__ import annotations

import os
import queue
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from nbdist.metrics.node import device, host
from nbdist.wire.questions.knowing import ProcessMemory
from nbdist.wire.questions.question import NoAnswer
from nbdist.wire.questions.questions import Answer, AnyAnswer, Ask

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
