"""What this machine is, as far as results on a GPU depend on it: prints names and values as JSON. Exits with 0."""

from __future__ import annotations

import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

LOOKS = 50


def main() -> int:
    """Print the facts. "gpus" is the number of GPUs that torch can use; all others are for people to read."""
    import torch

    usable = torch.cuda.is_available()
    facts: dict[str, object] = {
        "gpus": torch.cuda.device_count() if usable else 0,
        "GPU": gpus(torch) if usable else "no GPU",
        "torch": f"{torch.__version__}, CUDA {torch.version.cuda or 'none'}",
        "Python": f"{platform.python_version()}, {platform.system()} {platform.release()}",
        "CPU": f"{len(os.sched_getaffinity(0))} cores, {memory():.0f} GiB",
    }
    if usable:
        facts["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))
        facts |= asked_of_nvml()
    print(json.dumps(facts))
    return 0


def gpus(torch: Any) -> str:
    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    counts = [f"{names.count(name)} x {name}" for name in dict.fromkeys(names)]
    return ", ".join(counts)


def memory() -> float:
    """GiB of this machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30


def asked_of_nvml() -> dict[str, object]:
    """Driver, clocks, what a look costs, and whether it makes a context."""
    try:
        import pynvml
    except ImportError:
        return {"NVML": "no: nvidia-ml-py is missing"}
    try:
        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByIndex(0)
        sm, bus = pynvml.NVML_CLOCK_SM, pynvml.NVML_CLOCK_MEM
        return {
            "driver": text(pynvml.nvmlSystemGetDriverVersion()),
            "clocks": f"SM {pynvml.nvmlDeviceGetMaxClockInfo(handle, sm)} MHz at most, "
            f"memory {pynvml.nvmlDeviceGetMaxClockInfo(handle, bus)} MHz",
            "NVML": f"memory in {microseconds(lambda: pynvml.nvmlDeviceGetMemoryInfo(handle)):.0f} µs, "
            f"processes in {microseconds(lambda: pynvml.nvmlDeviceGetComputeRunningProcesses(handle)):.0f} µs",
        }
    except pynvml.NVMLError as error:
        return {"NVML": f"no: {error}"}


def microseconds(ask: Callable[[], object]) -> float:
    """The median of some calls."""
    taken = []
    for _ in range(LOOKS):
        began = time.perf_counter()
        ask()
        taken.append(time.perf_counter() - began)
    return 1e6 * statistics.median(taken)


def text(found: str | bytes) -> str:
    return found.decode() if isinstance(found, bytes) else found


if __name__ == "__main__":
    sys.exit(main())
