"""Looks that only the main thread may take, on behalf of other threads. Independent of what is looked at."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable
from typing import Any

from nbdist.base import limits

_PendingCall = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p)


class MainThreadLook:
    """Takes a look on the main thread, between two of its bytecodes, so where it is in no code of C.

    torch asks CUDA's allocator for its counters while it holds Python's own lock. If the main thread is inside of the
    allocator, which may wait for a collective that never ends, then whoever asks stops all threads of the process.

    Args:
        look: Takes it. Must not raise.
        idle: Whether the main thread waits for work, so that any thread may look.
    """

    def __init__(self, look: Callable[[], dict[str, Any]], idle: Callable[[], bool]) -> None:
        self._look = look
        self._idle = idle
        self._newest: dict[str, Any] | None = None
        self._seen_at = self._asked_at = 0.0
        self._taken = threading.Event()
        self._taken.set()
        self._callback = _PendingCall(self._take)

    def newest(self, oldest: float) -> dict[str, Any]:
        """Return what was seen now, or, while the main thread is in a call into C, at the last look.

        Args:
            oldest: Seconds that the last look may have been old when the main thread was asked for another: until it
                went into that call, things may have changed.

        Raises:
            TimeoutError: There is no such look.
        """
        if threading.current_thread() is threading.main_thread() or self._idle():
            self._note()
        elif self._taken.is_set():  # else it has been asked, and has not come back from C since
            self._taken.clear()
            self._asked_at = time.monotonic()
            if ctypes.pythonapi.Py_AddPendingCall(self._callback, None) == 0:
                self._taken.wait(limits.MAIN_THREAD)
            else:  # the interpreter's queue is full
                self._taken.set()
        if self._newest is None or self._seen_at < self._asked_at - oldest:
            raise TimeoutError("its main thread is in a call into C")
        return self._newest

    def _note(self) -> None:
        self._newest, self._seen_at = self._look(), time.monotonic()

    def _take(self, _: object) -> int:
        self._note()
        self._taken.set()
        return 0
