"""Calls that wait by spinning for what another thread does meanwhile, as CUDA's do for a kernel.

A collective of NCCL's returns when its kernel is queued (`WorkNCCL::wait` only blocks the stream:
torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp). What waits for the kernel is `.item()`, `synchronize()`, or any
operation once the queue is full: one call into C that no signal interrupts, without the GIL, and that uses a whole
processor where there are fewer contexts than processors (CUDA Driver API, `cuCtxCreate`: CU_CTX_SCHED_AUTO).
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import sys
import threading
import time
from collections.abc import Callable, Iterator
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


@contextlib.contextmanager
def noted_late(seconds: float) -> Iterator[None]:
    """Let torch's record show, for so long, as if the last collective that has ended had not.

    NCCL's watchdog, which notes what has ended, looks every 100 ms (ProcessGroupNCCL.cpp, `Watchdog::runLoop`:
    kWatchdogThreadSleepMillis); gloo notes it at once.
    """
    c10d: Any = sys.modules["torch._C._distributed_c10d"]
    dump, until = c10d._dump_fr_trace_json, time.monotonic() + seconds

    def dump_late(*arguments: Any) -> str:
        found = json.loads(dump(*arguments))
        for status in found["pg_status"].values() if time.monotonic() < until else ():
            status["last_completed_collective"] = str(int(status["last_completed_collective"]) - 1)
        return json.dumps(found)

    c10d._dump_fr_trace_json = dump_late
    try:
        yield
    finally:
        c10d._dump_fr_trace_json = dump
