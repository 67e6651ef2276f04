"""What the NVIDIA driver tells of its GPUs, MIG instances included, as GpuSamples.

Owns how NVML is asked and what its refusals mean. Creates no CUDA context, reads nothing over PCIe but what NVML keeps.
Independent of ranks; who maps them to GPUs does so by UUID.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from nbdist.metrics.node.driver import mig_instances
from nbdist.metrics.node.sample import GpuSample

_T = TypeVar("_T")

_MOST_POWER, _MOST_HEAT = 100_000_000, 200  # milliwatts and degrees Celsius that no chip reaches

# Bits of nvmlDeviceGetCurrentClocksEventReasons that mean that the chip is held back; idle and user settings do not.
_THROTTLED = {
    0x0000000000000004: "power limit",
    0x0000000000000008: "hardware slowdown",
    0x0000000000000020: "heat",
    0x0000000000000040: "heat (hardware)",
    0x0000000000000080: "power brake",
}


class Nvml:
    """The driver, as long as this lives.

    Args:
        library: The module to ask; None: `pynvml`.

    Attributes:
        why: Why there is nothing to read, in words; empty: there is.
    """

    def __init__(self, library: Any = None) -> None:
        self.why = ""
        self._nvml: Any = library
        self._open = False
        try:
            if library is None:
                import pynvml

                self._nvml = pynvml
            self._nvml.nvmlInit()
            self._open = True
        except Exception as error:  # no library, no driver, or none of ours: said in `why`
            self.why = _why_not(error)

    def close(self) -> None:
        """Let go of the driver."""
        if self._open:
            self._open = False
            self._ask(self._nvml.nvmlShutdown)

    def read(self) -> list[GpuSample]:
        """Return one look at all GPUs; of those cut into MIG instances, at the instances.

        Returns:
            A sample for each, by index. One that does not answer says so and the others are not affected.
        """
        if not self._open:
            return []
        try:
            count = int(self._nvml.nvmlDeviceGetCount())
        except Exception as error:  # as above
            self.why = _why_not(error)
            return []
        self.why = "" if count else "the driver reports no GPU"
        return [sample for index in range(count) for sample in self._gpu(index)]

    def _gpu(self, index: int) -> Iterator[GpuSample]:
        try:
            handle = self._nvml.nvmlDeviceGetHandleByIndex(index)
        except Exception as error:  # this GPU says why, the others are not affected
            yield GpuSample(uuid="", index=index, lost=_kind(error) == _IS_LOST, why=_failure(error))
            return
        for part in mig_instances(self._nvml, handle) or [handle]:
            yield self._sample(part, index, chip=handle)

    def _sample(self, handle: Any, index: int, *, chip: Any) -> GpuSample:
        """Return a sample of a GPU, or of an instance of it: power and heat are the whole chip's."""
        nvml, missing = self._nvml, _Missing()
        uuid = missing.try_to("UUID", nvml.nvmlDeviceGetUUID, handle)
        memory = missing.try_to("memory", self._memory, handle)
        busy = missing.try_to("utilization", lambda: _sound(nvml.nvmlDeviceGetUtilizationRates(handle).gpu, 100))
        power = missing.try_to("power", lambda: _sound(nvml.nvmlDeviceGetPowerUsage(chip), _MOST_POWER))
        limit = missing.try_to("power limit", lambda: _sound(nvml.nvmlDeviceGetEnforcedPowerLimit(chip), _MOST_POWER))
        heat = missing.try_to("temperature", lambda: _sound(nvml.nvmlDeviceGetTemperature(chip, 0), _MOST_HEAT))
        return GpuSample(
            uuid=_text(uuid or ""),
            index=index,
            name=_text(missing.try_to("name", nvml.nvmlDeviceGetName, handle) or ""),
            total=None if memory is None else memory[0],
            used=None if memory is None else memory[1],
            kept=0 if memory is None else memory[2],
            by_pid=missing.try_to("processes", self._by_pid, handle) or {},
            utilization=None if busy is None else busy / 100,
            temperature=heat,
            power=None if power is None else power / 1000,
            power_limit=None if limit is None else limit / 1000,
            throttled=missing.try_to("clocks", self._throttled, chip) or [],
            lost=missing.lost,
            why=missing.words(),
        )

    def _memory(self, handle: Any) -> tuple[int, int, int]:
        """Return the bytes of the device, those in use by processes, and those that the driver keeps for itself.

        Only the second version of the call tells the last two apart; the first counts both as used.
        """
        version = getattr(self._nvml, "nvmlMemory_v2", None)
        if version is not None:
            try:
                found = self._nvml.nvmlDeviceGetMemoryInfo(handle, version=version)
                return int(found.total), _sound(found.used, found.total), _sound(found.reserved, found.total)
            except Exception as error:  # before 510 the driver does not know this version
                if _kind(error) == _IS_LOST:
                    raise
        found = self._nvml.nvmlDeviceGetMemoryInfo(handle)
        return int(found.total), _sound(found.used, found.total), 0

    def _by_pid(self, handle: Any) -> dict[int, int]:
        """Return memory by process; empty where the driver numbers processes otherwise than this system does.

        In a container it may use the host's numbers, and one of them may be another process's here.
        """
        import psutil

        processes = self._nvml.nvmlDeviceGetComputeRunningProcesses(handle)
        if not all(psutil.pid_exists(int(each.pid)) for each in processes):
            return {}
        # A share may be hidden, or in containers 0: every process here has at least a context.
        return {int(each.pid): int(each.usedGpuMemory) for each in processes if each.usedGpuMemory}

    def _throttled(self, handle: Any) -> list[str]:
        try:
            bits = self._nvml.nvmlDeviceGetCurrentClocksEventReasons(handle)
        except Exception as error:  # before 535 the driver knows the function by its old name only
            if _kind(error) != "FunctionNotFound":
                raise
            bits = self._nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle)
        return [word for bit, word in _THROTTLED.items() if bits & bit]

    def _ask(self, function: Callable[..., _T], *arguments: Any) -> _T | None:
        try:
            return function(*arguments)
        except Exception:  # a driver of tomorrow may answer in ways that nobody knows
            return None


def read_once() -> list[GpuSample]:
    """Return one look at all GPUs, by who keeps no driver open."""
    driver = Nvml()
    try:
        return driver.read()
    finally:
        driver.close()


_IS_LOST = "GpuIsLost"
_LOST = "it has fallen off the bus: `nvidia-smi` and the kernel's log say more; a reboot brings it back"
_WORDS = {
    _IS_LOST: _LOST,
    "Nonsense": "the driver's answer makes no sense",
    "NotSupported": "this GPU does not report it",
    "NoPermission": "the driver does not let this user read it",
}


class Nonsense(Exception):
    """The driver has answered what can't be true, as it may for a while about a GPU that fails."""


def _sound(value: Any, most: int) -> int:
    if not isinstance(value, int) or not 0 <= value <= most:
        raise Nonsense(f"{value!r}")
    return value


class _Missing:
    """What could not be read, and why."""

    def __init__(self) -> None:
        self.lost = False
        self._names: dict[str, list[str]] = {}

    def try_to(self, name: str, function: Callable[..., _T], *arguments: Any) -> _T | None:
        if self.lost:
            return None
        try:
            return function(*arguments)
        except Exception as error:  # as above; one figure is lost, and said
            self.lost = _kind(error) == _IS_LOST
            self._names.setdefault(_failure(error), []).append(name)
            return None

    def words(self) -> str:
        if self.lost:
            return _LOST
        return "; ".join(f"no {', '.join(names)}: {why}" for why, names in self._names.items())


def _failure(error: Exception) -> str:
    kind = _kind(error)
    return _WORDS.get(kind, str(error) or kind)


def _kind(error: Exception) -> str:
    """Return what NVML calls an error: pynvml makes a class for each ("NVMLError_GpuIsLost")."""
    return type(error).__name__.rpartition("_")[2]


def _why_not(error: Exception) -> str:
    if isinstance(error, ImportError):
        return "the package nvidia-ml-py is not installed: `%pip install nvidia-ml-py`"
    words = {
        "LibraryNotFound": "this machine has no NVIDIA driver",
        "DriverNotLoaded": "the NVIDIA driver is not loaded",
        "NoPermission": "the NVIDIA driver does not let this user in",
        "FunctionNotFound": "the NVIDIA driver is too old for this: a newer one is needed",
        "LibRmVersionMismatch": "the NVIDIA driver was updated while it was loaded: a reboot is needed",
    }
    return words.get(_kind(error), f"the NVIDIA driver does not answer: {error}")


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
