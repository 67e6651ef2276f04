"""The thread that writes and reads the output log, so that a slow or hanging disk delays nothing else.

Answers from the log return to the caller's own loop. Independent of the wire.
"""

from __future__ import annotations

import contextlib
import functools
import os
import queue
import threading
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from nbdist.controller.base.outputlog import LastOutput, NewOutput, OutputLog, Part

_WAITING = 64 << 20  # bytes that may wait for the disk
_TAIL = 256 << 10  # bytes of what a cell has printed that are enough to see where it is
_CLOSE_LIMIT = 1.0  # seconds for the disk to finish when the log closes


@dataclass
class _Gap:
    """Output that came while too much was waiting for the disk: bytes by cell serial and number.

    told: whether the user was notified, and will be told the total.
    """

    told: bool
    sizes: dict[tuple[int, int], int] = field(default_factory=dict)


class LogWriter:
    """Gives an output log its own thread. No method waits for the disk except `close`, and that not for long.

    Args:
        log: The log. Nobody else may use it from now on.
        say: Called with each line for the user, by `finish` or `write`.
        limit: Bytes that may wait for the disk. Output beyond that is counted and left out.
    """

    def __init__(self, log: OutputLog, say: Callable[[str], None], limit: int = _WAITING) -> None:
        self._log = log
        self._say = say
        self._limit = limit
        self._lock = threading.Lock()  # for what both threads count:
        self._waiting = 0
        self._gap: _Gap | None = None
        self._complained = 0  # the last cell with a gap
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._thread = threading.Thread(target=self._work, name="nbdist-log", daemon=True)
        self._thread.start()

    def fileno(self) -> int:
        """Return a descriptor that is readable when there is something to `finish`."""
        return self._bell

    def finish(self) -> None:
        """Deliver the log's answers, in the caller's thread."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._bell)
        with contextlib.suppress(queue.Empty):
            while True:
                self._answers.get_nowait()()

    def write(
        self, serial: int, number: int, rank: int, stream: int, data: bytes, then: Callable[[], None] | None = None
    ) -> None:
        """Add what a rank printed in the cell `serial`.

        Args:
            then: Called by `finish` when the log has stored it or left it out.
        """
        if self._reserve(len(data)):
            self._jobs.put(functools.partial(self._write, serial, number, rank, stream, data, then))
            return
        self._leave_out(serial, number, len(data))
        if then is not None:
            self._jobs.put(functools.partial(self._answer, then))

    def read(self, then: Callable[[Part | None], None], **question: Any) -> None:
        """Have `finish` call `then` with the result of `OutputLog.read` for these arguments."""
        self._jobs.put(lambda: self._answer(functools.partial(then, self._log.read(**question))))

    def tails(self, then: Callable[[dict[int, LastOutput]], None], serials: Sequence[int]) -> None:
        """Have `finish` call `then` with the end of what each of these cells has printed until now."""
        self._jobs.put(
            lambda: self._answer(functools.partial(then, {serial: self._log.tail(serial, _TAIL) for serial in serials}))
        )

    def follow(self, then: Callable[[NewOutput], None], position: int) -> None:
        """Have `finish` call `then` with what was printed behind a position until now."""
        self._jobs.put(lambda: self._answer(functools.partial(then, self._log.follow(position))))

    def clear(self) -> None:
        """Forget everything."""
        self._jobs.put(self._log.clear)

    def close(self) -> None:
        """Remove every file, unless the disk hangs."""
        self._jobs.put(self._log.close)
        self._jobs.put(None)
        self._thread.join(_CLOSE_LIMIT)
        if not self._thread.is_alive():
            os.close(self._bell)

    def _reserve(self, size: int) -> bool:
        with self._lock:
            room = self._gap is None and self._waiting + size <= self._limit
            self._waiting += size if room else 0
            return room

    def _leave_out(self, serial: int, number: int, size: int) -> None:
        """Count output that is left out. The gap ends once everything before it is written, so it stays one gap."""
        with self._lock:
            gap, told = self._gap, serial != self._complained
            if gap is None:
                gap = self._gap = _Gap(told)
                self._jobs.put(functools.partial(self._end_gap, gap))
            gap.sizes[serial, number] = gap.sizes.get((serial, number), 0) + size
        if told:
            self._complained = serial
            self._say(
                f"the output log's disk can't keep up ({self._log.parent}), so the log leaves out part of what "
                "this cell prints. The cell keeps running and showing its output."
            )

    # --- in the log's own thread

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                job()
            except Exception:  # this output may be lost, but not what follows
                traceback.print_exc()

    def _answer(self, what: Callable[[], None]) -> None:
        self._answers.put(what)
        os.eventfd_write(self._bell, 1)

    def _write(
        self, serial: int, number: int, rank: int, stream: int, data: bytes, then: Callable[[], None] | None
    ) -> None:
        line = self._log.write(serial, number, rank, stream, data)
        with self._lock:
            self._waiting -= len(data)
        if line is not None:
            self._answer(functools.partial(self._say, line))
        if then is not None:
            self._answer(then)

    def _end_gap(self, gap: _Gap) -> None:
        with self._lock:
            self._gap = None
        for (serial, number), size in gap.sizes.items():
            self._log.miss(serial, number, size)
        if gap.told:
            lost = sum(gap.sizes.values()) / 1e6
            self._answer(functools.partial(self._say, f"the output log continues; {lost:.1f} MB are missing from it"))
