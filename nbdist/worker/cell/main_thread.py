"""Looks that only the main thread may take, on behalf of other threads. Knows nothing of what is looked at."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from typing import Any

from nbdist import limits

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
        self._taken = threading.Event()
        self._taken.set()
        self._callback = _PendingCall(self._take)

    def newest(self) -> dict[str, Any]:
        """Return what was seen now, or, while the main thread is in a call into C, when it last was not.

        Raises:
            TimeoutError: It has been in one ever since it was first asked to look.
        """
        if threading.current_thread() is threading.main_thread() or self._idle():
            self._newest = self._look()
        elif self._taken.is_set():  # else it has been asked, and has not come back from C since
            self._taken.clear()
            if ctypes.pythonapi.Py_AddPendingCall(self._callback, None) == 0:
                self._taken.wait(limits.MAIN_THREAD)
            else:  # the interpreter's queue is full
                self._taken.set()
        if self._newest is None:
            raise TimeoutError("its main thread is in a call into C")
        return self._newest

    def _take(self, _: object) -> int:
        self._newest = self._look()
        self._taken.set()
        return 0
