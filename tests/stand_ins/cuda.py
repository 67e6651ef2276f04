"""torch.cuda of a process that uses GPUs: its allocator, its errors, and its waits. Without a GPU.

What it does, and where torch 2.13 does so (its sources; headers as in the wheel):

- The allocator's lock is taken with the GIL held to read its counters (`THCPModule_memoryStats` in
  torch/csrc/cuda/Module.cpp keeps it; `THCPModule_emptyCache` does not), and without it to allocate. Who allocates may
  have the lock for as long as a kernel runs: when memory is short, `DeviceCachingAllocator::malloc` frees cached blocks
  and waits for their events (`synchronize_and_free_events`, c10/cuda/CUDACachingAllocator.cpp). It is recursive.
- The counters are the process's own: no call of CUDA's, so they are still told when the context is lost.
- Errors are sticky: kernels fail later, and from then on each call of CUDA's that waits or starts work raises
  `torch.AcceleratorError` with the same text until the process ends (CUDA Runtime API, cudaErrorAssert: "all existing
  device memory allocations are invalid"; c10/cuda/CUDAException.cpp; c10/util/Exception.h:332). A CPU build raises
  that class from Python only, so here it never comes out of native code.
- `mem_get_info` asks the driver, for the whole device (torch/cuda/memory.py:862); its total is without what the driver
  keeps for itself.
- A UUID is written bare, without NVML's "GPU-" (`cudaDeviceProp::uuid`).

Kernels that end later, and calls that spin until they do: `tests.stand_ins.spinning`. Streams with memory of their own:
`tests.stand_ins.streams`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

from torch import AcceleratorError

from tests.stand_ins.spinning import spin, spinning_until

_RECURSIVE = 1  # PTHREAD_MUTEX_RECURSIVE of Linux
_ROOM = 64  # bytes: a pthread_mutex_t has 40 on x86-64 and 48 on aarch64
ASSERTED, OUT_OF_MEMORY = 710, 2  # cudaErrorAssert, cudaErrorMemoryAllocation


class Lock:
    """A lock of C++'s: who waits for it keeps Python's own lock, or not."""

    def __init__(self) -> None:
        self._mutex = ctypes.create_string_buffer(_ROOM)
        kind = ctypes.create_string_buffer(_ROOM)
        libc = ctypes.CDLL(None)
        libc.pthread_mutexattr_init(kind)
        libc.pthread_mutexattr_settype(kind, _RECURSIVE)
        libc.pthread_mutex_init(self._mutex, kind)

    @contextmanager
    def with_gil(self) -> Iterator[None]:
        """All of this process's Python stands still while it is waited for."""
        with self._held_by(ctypes.PyDLL(None)):
            yield

    @contextmanager
    def without_gil(self) -> Iterator[None]:
        with self._held_by(ctypes.CDLL(None)):
            yield

    @contextmanager
    def _held_by(self, libc: Any) -> Iterator[None]:
        libc.pthread_mutex_lock(self._mutex)
        try:
            yield
        finally:
            libc.pthread_mutex_unlock(self._mutex)


class Allocator:
    """torch's caching allocator of one device, as far as its counters go."""

    def __init__(self) -> None:
        self.now = {"allocated_bytes": 0, "reserved_bytes": 0}
        self.peak = dict(self.now)
        self.lock = Lock()

    def allocate(self, size: int) -> None:
        with self.lock.without_gil():
            for name in self.now:
                self.now[name] += size
                self.peak[name] = max(self.peak[name], self.now[name])

    def free(self, size: int) -> None:
        with self.lock.without_gil():
            self.now["allocated_bytes"] -= size

    def allocate_when_full(self, over: Callable[[], object]) -> None:
        """Allocate when memory is short: wait, spinning and with the lock, until `over` returns: a kernel has ended."""
        with self.lock.without_gil():
            spin(spinning_until(over))

    def stats(self) -> dict[str, Any]:
        """The counters, nested as `torch._C._cuda_memoryStats` has them."""
        with self.lock.with_gil():
            leaves = {name: {"all": {"current": self.now[name], "peak": self.peak[name]}} for name in self.now}
            return leaves | {"num_ooms": 0, "num_alloc_retries": 0}

    def reset(self) -> None:
        with self.lock.with_gil():
            self.peak = dict(self.now)


class Torch:
    """What is read of torch, where it uses CUDA: `_C` and `cuda`, to be put in their places.

    Args:
        uuids: Of its GPUs, as NVML writes them, in the order that CUDA has them in.
        total: Bytes of each.
        taken: Bytes of each that others have, and the context of this process.

    Attributes:
        gpus: The allocator of each.
        initialized: Whether CUDA is.
        on_look: Called when the counters are read, before the lock is waited for.
    """

    def __init__(self, *uuids: str, total: int = 80, taken: int = 10) -> None:
        self.gpus = [Allocator() for _ in uuids]
        self.initialized = bool(uuids)
        self.on_look: Callable[[], object] = lambda: None
        self._uuids, self._total, self._taken = uuids, total, taken
        self._error: AcceleratorError | None = None
        self._C = SimpleNamespace(
            _cuda_getDeviceCount=lambda: len(uuids),
            _cuda_hasPrimaryContext=lambda index: index == 0 or self._reserved(index) > 0,
            _cuda_memoryStats=self._stats,
            _cuda_resetPeakMemoryStats=lambda index: self.gpus[index].reset(),
        )
        self.cuda = SimpleNamespace(
            is_initialized=lambda: self.initialized,
            device_count=lambda: len(uuids),
            current_device=lambda: 0,
            get_device_properties=lambda index: SimpleNamespace(uuid=uuids[index].removeprefix("GPU-")),
            memory_stats=lambda index: dict(_flat(self._stats(index))),
            memory_reserved=self._reserved,
            memory_allocated=lambda index: self._stats(index)["allocated_bytes"]["all"]["current"],
            mem_get_info=self._mem_get_info,
            synchronize=self._check,
        )

    def lose_context(self) -> None:
        """A kernel has failed, and nobody has noticed yet."""
        self._error = accelerator_error("device-side assert triggered", "cudaErrorAssert", ASSERTED)

    def max_memory_allocated(self) -> int:
        return int(self._C._cuda_memoryStats(0)["allocated_bytes"]["all"]["peak"])

    def _stats(self, index: int) -> dict[str, Any]:
        self.on_look()
        return self.gpus[index].stats()

    def _reserved(self, index: int) -> int:
        return int(self._stats(index)["reserved_bytes"]["all"]["current"])

    def _mem_get_info(self, index: int) -> tuple[int, int]:
        self._check()
        return self._total - self._taken - self.gpus[index].now["reserved_bytes"], self._total

    def _check(self, _: object = None) -> None:
        if self._error is not None:
            raise self._error.with_traceback(None)


def accelerator_error(words: str, name: str, code: int) -> AcceleratorError:
    """An error of the CUDA runtime's, as torch 2.13 raises it.

    Args:
        words: What cudaGetErrorString says of it.
        name: Its name.
        code: Its number (cudaError_t).
    """
    error: Any = AcceleratorError(
        f"CUDA error: {words}\nSearch for `{name}' in https://docs.nvidia.com/cuda/cuda-runtime-api/"
        "group__CUDART__TYPES.html for more information.\nCUDA kernel errors might be asynchronously reported at some "
        "other API call, so the stacktrace below might be incorrect.\nFor debugging consider passing "
        "CUDA_LAUNCH_BLOCKING=1\nCompile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.\n"
    )
    error.error_code = code
    return error


def _flat(stats: dict[str, Any], path: Sequence[str] = ()) -> Iterator[tuple[str, int]]:
    """The counters as torch.cuda.memory_stats has them: {"allocated_bytes.all.current": 0}."""
    for name, value in stats.items():
        if isinstance(value, dict):
            yield from _flat(value, (*path, name))
        else:
            yield ".".join((*path, name)), value
