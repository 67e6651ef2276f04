"""The signals by which a scheduler announces an end: SIGUSR1 ends no process of ours, SIGTERM only after a grace.

Independent of what is to be done about it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Literal

EndSignal = Literal["SIGUSR1", "SIGTERM"]


def ignore() -> None:
    """Have SIGUSR1 not end this process, nor the programs that it starts before they handle it."""
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)


class EndSignals:
    """Handles them in this process from now on. To be made in its main thread.

    A handler of the user's own for SIGUSR1 stays.

    Args:
        heard: Called with the signal's name and the seconds until the process ends of it, None: it doesn't. In the main
            thread, between any two instructions of Python.
    """

    def __init__(self, heard: Callable[[EndSignal, float | None], None]) -> None:
        self._heard = heard
        self._pid = os.getpid()
        self._grace = 0.0
        self._ends = self._over = False
        if _is_free(signal.getsignal(signal.SIGUSR1)):
            signal.signal(signal.SIGUSR1, self._handle)

    def spare(self, grace: float) -> None:
        """Outlive SIGTERM by this many seconds; 0: not at all."""
        if grace == self._grace:
            return
        self._grace = grace
        signal.signal(signal.SIGTERM, self._handle if grace else signal.SIG_DFL)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGUSR1:
            if os.getpid() == self._pid:
                self._heard("SIGUSR1", None)
        elif self._over or os.getpid() != self._pid:  # a child that was forked from it ends as if this were not here
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGTERM)
        elif not self._ends:
            self._ends = True
            timer = threading.Timer(self._grace, self._end)
            timer.daemon = True
            timer.start()
            self._heard("SIGTERM", self._grace)

    def _end(self) -> None:
        self._over = True
        os.kill(self._pid, signal.SIGTERM)


def _is_free(handler: object) -> bool:
    """Return whether a signal's handler is nobody's, or one that was inherited from another process of ours."""
    return handler in (signal.SIG_DFL, signal.SIG_IGN) or isinstance(getattr(handler, "__self__", None), EndSignals)


class EndSignalPipe:
    """The same for a process that polls descriptors.

    Attributes:
        descriptor: Readable when a signal has come: then `take` it.
    """

    def __init__(self) -> None:
        self.descriptor, self._write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._came: list[tuple[EndSignal, float | None]] = []
        self._signals = EndSignals(self._note)

    def spare(self, grace: float) -> None:
        """Outlive SIGTERM by this many seconds; 0: not at all."""
        self._signals.spare(grace)

    def take(self) -> list[tuple[EndSignal, float | None]]:
        """Return the signals that have come, each with the seconds that are left."""
        with contextlib.suppress(BlockingIOError):
            os.read(self.descriptor, 4096)
        came, self._came = self._came, []
        return came

    def _note(self, name: EndSignal, seconds: float | None) -> None:
        self._came.append((name, seconds))
        with contextlib.suppress(BlockingIOError):  # it is ready already
            os.write(self._write, b".")
