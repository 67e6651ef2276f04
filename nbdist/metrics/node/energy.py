"""What a cell spends: its time, and the energy of the GPU that its process uses, by the driver's own counter.

Reads the counter twice a cell, once its process uses a GPU; without one no driver is opened.
"""

from __future__ import annotations

import importlib
import sys
import time
from typing import Any

from nbdist.base import limits
from nbdist.metrics.node import device
from nbdist.metrics.node.driver import within_limit
from nbdist.metrics.node.sample import Spent

SHORTEST = 10 * limits.ENERGY_LATE  # seconds of a cell: in a shorter one, more than a tenth might be another's


class GpuEnergy:
    """The energy counter of a GPU, as long as this lives.

    Args:
        uuid: The GPU's, as NVML writes it.
        library: The module to ask; None: `pynvml`.
    """

    def __init__(self, uuid: str, library: Any = None) -> None:
        self.uuid = uuid
        self._library = library
        self._nvml: Any = None  # once it is open
        self._handle: Any = None
        self._is_silent = False  # it has no such counter, or has not answered in time

    def read(self) -> float | None:
        """Return the joules since the driver was loaded (Volta and later); None where they are not counted."""
        if self._is_silent:
            return None
        joules = within_limit(self._ask, None)
        self._is_silent = joules is None
        return joules

    def _ask(self) -> float:
        if self._nvml is None:
            library = self._library or importlib.import_module("pynvml")
            library.nvmlInit()
            self._handle, self._nvml = library.nvmlDeviceGetHandleByUUID(self.uuid), library
        return int(self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._handle)) / 1000


class Spending:
    """What cells spend, one after the other."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._energy: GpuEnergy | None = None
        self._at_start: float | None = None

    def begin(self) -> None:
        """Begin a cell."""
        self._began = time.monotonic()
        if self._energy is None:
            uuid = _gpu_in_use()
            self._energy = GpuEnergy(uuid) if uuid else None
        self._at_start = self._energy.read() if self._energy is not None else None

    def end(self) -> Spent:
        """Return what the cell has spent.

        Its energy is not known if the process has begun to use its GPU in it, or if it took less than a second.
        """
        seconds = time.monotonic() - self._began
        if self._energy is None or self._at_start is None or seconds < SHORTEST:
            return Spent(seconds)
        now = self._energy.read()
        return Spent(seconds, None if now is None else max(0.0, now - self._at_start), self._energy.uuid)


def _gpu_in_use() -> str:
    """Return the UUID of this process's GPU; empty if it uses none yet."""
    if not device.uses_gpu():
        return ""
    cuda = sys.modules["torch.cuda"]
    return device.uuid(cuda, device.in_use(cuda, int(cuda.current_device())))
