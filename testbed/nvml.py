"""An NVML that a dict drives, with pynvml's own errors and constants.

In this process: `Nvml(FakeNvml({...}))`. In others: put the folder that `as_module` makes first on their path, and
change the file beside it to change what they see.

What it does, and who says that the real one does:

- It answers when it likes, without the GIL, `nvmlInit` too: pynvml calls by `ctypes.CDLL`. Without persistence each GPU
  is initialized anew, in seconds (NVIDIA, "Driver Persistence"). For how long a driver may hang is not known; here for
  ever, or until somebody sets "seconds" back.
- It wants `nvmlInit` first, and counts it and `nvmlShutdown` (NVML API, "Initialization and Cleanup"; before, calls
  fail with NVML_ERROR_UNINITIALIZED).
- What the driver keeps for itself, "reserved", is used by version 1 of the call (NVML API, `nvmlMemory_t`: "Sum of
  Reserved and Allocated"), and neither used nor free by version 2, whose total is the whole device's all the same
  (`nvmlMemory_v2_t`; on an A100 912 MB and 7.8 MB are "used": Cldfire/nvml-wrapper#57).
- In containers it names processes by the host's numbers (NVIDIA/nvidia-docker#1483: "you will always get the host
  pids"), or by the container's with 0 bytes each (driver 560: Project-HAMi/HAMi-core#112, NVIDIA's
  open-gpu-kernel-modules#614). Which driver does which is not known: a test chooses by "processes".
- It hides what a process has (pynvml, `nvmlDeviceGetComputeRunningProcesses`: NVML_VALUE_NOT_AVAILABLE becomes None).
- An older driver lacks functions that pynvml has, which raise NVMLError_FunctionNotFound then: version 2 of the memory
  ("memory_v2"), nvmlDeviceGetCurrentClocksEventReasons ("event_reasons": NVML API, "Change Log", 535).
- It refuses what a chip or a MIG instance can't tell (NVML_ERROR_NOT_SUPPORTED, at each function), and loses a GPU
  while it is asked (NVML_ERROR_GPU_IS_LOST).
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pynvml

GIB = 1 << 30


def gpu(index: int = 0, **changes: Any) -> dict[str, Any]:
    """A GPU that answers everything. A value that is an error's name ("NOT_SUPPORTED") is raised instead.

    Of "processes" the key is a number, or "self" for whichever process asks; "seconds" is what each answer takes.
    """
    return {
        "uuid": f"GPU-{index:08d}",
        "name": "NVIDIA H100 80GB HBM3",
        "total": 80 * GIB,
        "used": 10 * GIB,
        "reserved": GIB // 2,
        "utilization": 55,
        "temperature": 41,
        "power": 350_000,
        "power_limit": 700_000,
        "energy": 0,
        "clocks": 0,
        "processes": {},
        "mig": [],
        "seconds": 0.0,
        "memory_v2": True,
        "event_reasons": True,
        **changes,
    }


def machine(count: int = 1, **changes: Any) -> dict[str, Any]:
    """A machine with so many GPUs. "init", "count", "shutdown": names of errors that these calls raise."""
    return {
        "init": None,
        "count": None,
        "shutdown": None,
        "driver": "580.65.06",
        "seconds": 0.0,
        "gpus": [gpu(index, **changes) for index in range(count)],
    }


class FakeNvml:
    """The functions of pynvml that nbdist calls. A handle is the dict of its GPU or MIG instance.

    Attributes:
        calls: Questions about GPUs so far.
        opened: Calls of `nvmlInit` that no `nvmlShutdown` has undone.
    """

    nvmlMemory_v2 = pynvml.nvmlMemory_v2

    def __init__(self, state: dict[str, Any] | Path) -> None:
        self._source = state
        self.calls = self.opened = 0

    @property
    def state(self) -> dict[str, Any]:
        if isinstance(self._source, Path):
            found: dict[str, Any] = json.loads(self._source.read_text())
            return found
        return self._source

    def nvmlInit(self) -> None:
        self._wait(lambda: self.state.get("seconds", 0.0))
        _check(self.state["init"])
        self.opened += 1

    def nvmlShutdown(self) -> None:
        self._check_open()
        _check(self.state.get("shutdown"))
        self.opened -= 1

    def nvmlSystemGetDriverVersion(self) -> str:
        self._check_open()
        version: str = self.state["driver"]
        return version

    def nvmlDeviceGetCount(self) -> int:
        self._check_open()
        _check(self.state.get("count"))
        return len(self.state["gpus"])

    def nvmlDeviceGetHandleByIndex(self, index: int) -> dict[str, Any]:
        self._check_open()
        handle: dict[str, Any] = self.state["gpus"][index]
        _check(handle.get("handle"))
        return handle

    def nvmlDeviceGetUUID(self, handle: dict[str, Any]) -> Any:
        return self._of(handle, "uuid")

    def nvmlDeviceGetName(self, handle: dict[str, Any]) -> Any:
        return self._of(handle, "name")

    def nvmlDeviceGetMigMode(self, handle: dict[str, Any]) -> list[int]:
        if handle.get("mig") is None:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return [int(bool(handle["mig"]))] * 2

    def nvmlDeviceGetMaxMigDeviceCount(self, handle: dict[str, Any]) -> int:
        return 7

    def nvmlDeviceGetMigDeviceHandleByIndex(self, handle: dict[str, Any], number: int) -> dict[str, Any]:
        if number >= len(handle["mig"]):
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)
        instance: dict[str, Any] = handle["mig"][number]
        return instance

    def nvmlDeviceGetMemoryInfo(self, handle: dict[str, Any], version: int | None = None) -> SimpleNamespace:
        if version is not None and not handle["memory_v2"]:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_FUNCTION_NOT_FOUND)
        used, total, reserved = self._of(handle, "used"), handle["total"], handle["reserved"]
        if version is None:
            return SimpleNamespace(total=total, used=used + reserved, free=total - used - reserved)
        return SimpleNamespace(total=total, used=used, reserved=reserved, free=total - used - reserved)

    def nvmlDeviceGetUtilizationRates(self, handle: dict[str, Any]) -> SimpleNamespace:
        return SimpleNamespace(gpu=self._of(handle, "utilization"))

    def nvmlDeviceGetTemperature(self, handle: dict[str, Any], sensor: int) -> Any:
        return self._of(handle, "temperature")

    def nvmlDeviceGetPowerUsage(self, handle: dict[str, Any]) -> Any:
        return self._of(handle, "power")

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> dict[str, Any]:
        self._check_open()
        for handle in self.state["gpus"]:
            if handle["uuid"] == uuid:
                found: dict[str, Any] = handle
                return found
        raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: dict[str, Any]) -> Any:
        return self._of(handle, "energy")

    def nvmlDeviceGetEnforcedPowerLimit(self, handle: dict[str, Any]) -> Any:
        return self._of(handle, "power_limit")

    def nvmlDeviceGetCurrentClocksEventReasons(self, handle: dict[str, Any]) -> Any:
        if not handle["event_reasons"]:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_FUNCTION_NOT_FOUND)
        return self._of(handle, "clocks")

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle: dict[str, Any]) -> Any:
        return self._of(handle, "clocks")

    def nvmlDeviceGetComputeRunningProcesses(self, handle: dict[str, Any]) -> list[SimpleNamespace]:
        shares = self._of(handle, "processes")
        numbers = {pid: os.getpid() if pid == "self" else int(pid) for pid in shares}
        return [SimpleNamespace(pid=numbers[pid], usedGpuMemory=share) for pid, share in shares.items()]

    def _of(self, handle: dict[str, Any], name: str) -> Any:
        self._check_open()
        self.calls += 1
        self._wait(lambda: self._seconds(handle))
        _check(handle[name])
        return handle[name]

    def _check_open(self) -> None:
        if not self.opened:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_UNINITIALIZED)

    def _wait(self, seconds: Callable[[], float]) -> None:
        """Take as long as is asked for; who asks for less meanwhile frees a driver that hangs."""
        began = time.monotonic()
        while (left := began + seconds() - time.monotonic()) > 0:
            time.sleep(min(0.01, left))

    def _seconds(self, handle: dict[str, Any]) -> float:
        now = next((gpu for gpu in self.state["gpus"] if gpu["uuid"] == handle["uuid"]), handle)
        return float(now["seconds"])


def _check(value: Any) -> None:
    """Raise the error that a value names."""
    code = getattr(pynvml, f"NVML_ERROR_{value}", None) if isinstance(value, str) and value.isupper() else None
    if code is not None:
        raise pynvml.NVMLError(code)


def as_module(folder: Path, state: dict[str, Any]) -> Path:
    """Make a `pynvml` for other processes.

    Returns:
        The file with the state; they read it anew for each question.
    """
    source = folder / "gpus.json"
    source.write_text(json.dumps(state))
    here, real = Path(__file__), Path(pynvml.__file__).parent
    (folder / "pynvml.py").write_text(
        f"import importlib.util, sys\nfrom pathlib import Path\n"
        f"spec = importlib.util.spec_from_file_location('pynvml', {str(real / 'pynvml.py')!r})\n"
        "real, this = importlib.util.module_from_spec(spec), sys.modules[__name__]\n"
        "sys.modules[__name__] = real  # it makes its errors' classes in the module of its name\n"
        "spec.loader.exec_module(real)\n"
        "sys.modules[__name__] = this\n"
        "globals().update({k: v for k, v in vars(real).items() if not k.startswith('__')})\n"
        f"spec = importlib.util.spec_from_file_location('stand_in', {str(here)!r})\n"
        "fake = importlib.util.module_from_spec(spec)\nspec.loader.exec_module(fake)\n"
        f"fake = fake.FakeNvml(Path({str(source)!r}))\n"
        "globals().update({k: getattr(fake, k) for k in dir(fake) if k.startswith('nvml')})\n"
    )
    return source
