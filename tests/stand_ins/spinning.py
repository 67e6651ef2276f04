"""A call into C that waits by spinning, as CUDA does."""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections.abc import Callable
from typing import Any

_libc = ctypes.CDLL(None)


def spinning_until(over: Callable[[], object]) -> Any:
    """What `spin` waits for: until this function, called in a thread of its own, has returned."""
    lock = ctypes.c_int()
    _libc.pthread_spin_init(ctypes.byref(lock), 0)
    _libc.pthread_spin_lock(ctypes.byref(lock))

    def unlock() -> None:
        with contextlib.suppress(RuntimeError):
            over()
        _libc.pthread_spin_unlock(ctypes.byref(lock))

    threading.Thread(target=unlock, daemon=True).start()
    return ctypes.byref(lock)


spin = _libc.pthread_spin_lock
