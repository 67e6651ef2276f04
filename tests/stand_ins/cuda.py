"""torch's CUDA, without a GPU: the allocator's statistics."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any


class Allocator:
    """torch's statistics of one device, as far as they are read here."""

    def __init__(self) -> None:
        self.now = {"allocated_bytes": 0, "reserved_bytes": 0}
        self.peak = dict(self.now)

    def allocate(self, size: int) -> None:
        for name in self.now:
            self.now[name] += size
            self.peak[name] = max(self.peak[name], self.now[name])

    def free(self, size: int) -> None:
        self.now["allocated_bytes"] -= size

    def stats(self) -> dict[str, Any]:
        leaves = {name: {"all": {"current": self.now[name], "peak": self.peak[name]}} for name in self.now}
        return leaves | {"num_ooms": 0}

    def reset(self) -> None:
        self.peak = dict(self.now)


class TorchWithGpus:
    """A torch with two GPUs of 80 bytes, the second without a context of this process."""

    def __init__(self) -> None:
        self.gpus = [Allocator(), Allocator()]
        self.initialized = True
        self.broken = False
        self._C = SimpleNamespace(
            _cuda_getDeviceCount=lambda: 2,
            _cuda_hasPrimaryContext=lambda index: index == 0 or self.gpus[index].now["reserved_bytes"] > 0,
            _cuda_memoryStats=lambda index: self.gpus[index].stats(),
            _cuda_resetPeakMemoryStats=lambda index: self.gpus[index].reset(),
        )
        self.cuda = SimpleNamespace(
            is_initialized=lambda: self.initialized,
            device_count=lambda: 2,
            current_device=lambda: 0,
            get_device_properties=lambda index: SimpleNamespace(uuid=f"uuid-{index}"),
            mem_get_info=self._mem_get_info,
        )

    def _mem_get_info(self, index: int) -> tuple[int, int]:
        if self.broken:
            raise RuntimeError("CUDA error: device-side assert triggered\nmore words")
        return 70 - self.gpus[index].now["reserved_bytes"], 80

    def max_memory_allocated(self) -> int:
        return int(self._C._cuda_memoryStats(0)["allocated_bytes"]["all"]["peak"])
