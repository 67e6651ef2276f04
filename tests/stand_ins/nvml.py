"""An NVML that a dict drives, with pynvml's own errors and constants: for tests on machines without GPUs.

In this process: `Nvml(FakeNvml({...}))`. In others: put the folder that `as_module` makes first on their path, and
change the file beside it to change what they see.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pynvml

GIB = 1 << 30


def gpu(index: int = 0, **changes: Any) -> dict[str, Any]:
    """A GPU that answers everything. A value that is an error's name ("NotSupported") is raised instead."""
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
        "clocks": 0,
        "processes": {},
        "mig": [],
        "seconds": 0.0,
        "memory_v2": True,
        **changes,
    }


def machine(count: int = 1, **changes: Any) -> dict[str, Any]:
    """A machine with so many GPUs."""
    return {"init": None, "gpus": [gpu(index, **changes) for index in range(count)]}


class FakeNvml:
    """The functions of pynvml that nbdist calls. A handle is the dict of its GPU or MIG instance."""

    nvmlMemory_v2 = 2

    def __init__(self, state: dict[str, Any] | Path) -> None:
        self._source = state
        self.calls = 0

    @property
    def state(self) -> dict[str, Any]:
        if isinstance(self._source, Path):
            found: dict[str, Any] = json.loads(self._source.read_text())
            return found
        return self._source

    def nvmlInit(self) -> None:
        _check(self.state["init"])

    def nvmlShutdown(self) -> None: ...

    def nvmlDeviceGetCount(self) -> int:
        return len(self.state["gpus"])

    def nvmlDeviceGetHandleByIndex(self, index: int) -> dict[str, Any]:
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
        used, total = self._of(handle, "used"), handle["total"]
        # The first version counts as used what the driver keeps for itself.
        return SimpleNamespace(total=total, used=used if version else used + handle["reserved"])

    def nvmlDeviceGetUtilizationRates(self, handle: dict[str, Any]) -> SimpleNamespace:
        return SimpleNamespace(gpu=self._of(handle, "utilization"))

    def nvmlDeviceGetTemperature(self, handle: dict[str, Any], sensor: int) -> Any:
        return self._of(handle, "temperature")

    def nvmlDeviceGetPowerUsage(self, handle: dict[str, Any]) -> Any:
        return self._of(handle, "power")

    def nvmlDeviceGetEnforcedPowerLimit(self, handle: dict[str, Any]) -> Any:
        return self._of(handle, "power_limit")

    def nvmlDeviceGetCurrentClocksEventReasons(self, handle: dict[str, Any]) -> Any:
        return self._of(handle, "clocks")

    def nvmlDeviceGetComputeRunningProcesses(self, handle: dict[str, Any]) -> list[SimpleNamespace]:
        shares = self._of(handle, "processes")
        return [SimpleNamespace(pid=int(pid), usedGpuMemory=share) for pid, share in shares.items()]

    def _of(self, handle: dict[str, Any], name: str) -> Any:
        self.calls += 1
        end = time.monotonic() + handle["seconds"]
        while time.monotonic() < end and self._is_slow(handle):
            time.sleep(min(0.01, handle["seconds"]))
        _check(handle[name])
        return handle[name]

    def _is_slow(self, handle: dict[str, Any]) -> bool:
        """Whether it still is, so that a driver which hangs can be freed."""
        now = next((gpu for gpu in self.state["gpus"] if gpu["uuid"] == handle["uuid"]), handle)
        return bool(now["seconds"])


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
