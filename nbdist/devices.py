"""The GPUs of this machine, found without initializing CUDA in this process. Independent of ranks."""

from __future__ import annotations

import contextlib
import functools
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nbdist.metrics.node.driver import ask_once, mig_instances

DEVICES = Path("/dev")
_FILES = ("nvidia[0-9]*", "dxg", "nvhost-gpu", "kfd")  # of NVIDIA's driver, of WSL, Jetson, ROCm
_LISTS = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
_COUNT = "import torch; print(torch.cuda.device_count())"
DRIVER_LIMIT = 60.0  # seconds: without persistence the driver initializes each GPU first
_COUNT_LIMIT = 120.0  # seconds: torch may come over a slow network

_WITHOUT_PEER_ACCESS = "RTX 40"
_FIRST_DRIVER = (550, 40, 7)  # the first that does not offer these GPUs what they lack
_WITHOUT_DIRECT_LINKS = {"NCCL_P2P_DISABLE": "1", "NCCL_IB_DISABLE": "1"}


def visible_gpus(environment: Mapping[str, str] = os.environ) -> list[str]:
    """Return the GPUs that CUDA would show under this environment, as CUDA_VISIBLE_DEVICES names them.

    Returns:
        Indices or UUIDs; empty without GPUs or without a driver.
    """
    listed = environment.get("CUDA_VISIBLE_DEVICES")
    uncut: list[str] = []
    if listed is None and (cut := ask_once(_names_of_cut, uncut, DRIVER_LIMIT)):
        return cut
    count = _count()
    if listed is None:
        return [str(index) for index in range(count)]
    names = []
    for name in (part.strip() for part in listed.split(",")):
        if not name or (name.lstrip("-").isdigit() and not 0 <= int(name) < count):
            break  # CUDA itself stops at the first entry that it does not know
        names.append(name)
    return names if count else []


def _names_of_cut(nvml: Any) -> list[str]:
    """Return UUIDs of all GPUs if some are cut into MIG instances, else nothing: then indices do."""
    names, is_cut = [], False
    for handle in _handles(nvml):
        instances = mig_instances(nvml, handle)
        is_cut |= instances is not None
        names += [_text(nvml.nvmlDeviceGetUUID(each)) for each in ([handle] if instances is None else instances)]
    return names if is_cut else []


def _handles(nvml: Any) -> list[Any]:
    """Return the GPUs that can be asked: one may have fallen off the bus."""
    found = []
    for index in range(int(nvml.nvmlDeviceGetCount())):
        with contextlib.suppress(Exception):
            found.append(nvml.nvmlDeviceGetHandleByIndex(index))
    return found


def nccl_variables(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return what NCCL must be told of this machine's GPUs, unless the user has told it.

    Drivers before 550.40.07 offer GeForce RTX 40 direct access to each other, which hangs; `accelerate launch` sets the
    same, and `Accelerator()` refuses to work without.

    Returns:
        Environment variables for ranks; empty for other GPUs and newer drivers.
    """
    unknown: tuple[list[str], str] = ([], "")
    names, driver = ask_once(_names_and_version, unknown, DRIVER_LIMIT)
    if len(names) < 2 or not any(_WITHOUT_PEER_ACCESS in name for name in names):
        return {}
    parts = tuple(int(part) for part in driver.split(".") if part.isdigit())
    if not parts or parts >= _FIRST_DRIVER:
        return {}
    return {name: value for name, value in _WITHOUT_DIRECT_LINKS.items() if name not in environment}


def _names_and_version(nvml: Any) -> tuple[list[str], str]:
    names = []
    for handle in _handles(nvml):
        with contextlib.suppress(Exception):  # it is lost just now
            names.append(_text(nvml.nvmlDeviceGetName(handle)))
    return names, _text(nvml.nvmlSystemGetDriverVersion())


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


def unusable_gpus(environment: Mapping[str, str] = os.environ) -> list[str]:
    """Device files of GPUs that PyTorch can't use; empty where it can, and where there are none or they are hidden."""
    hidden = any(name in environment for name in _LISTS)
    return [] if hidden or _count() else [str(path) for path in _device_files()]


def _device_files() -> list[Path]:
    return sorted(path for pattern in _FILES for path in DEVICES.glob(pattern))


def _count() -> int:
    """Return the GPUs of this machine.

    The management library is missing in containers without the driver's "utility" capability, on Jetson and with ROCm.
    """
    count = ask_once(lambda nvml: int(nvml.nvmlDeviceGetCount()), 0, DRIVER_LIMIT)
    return count if count or not _device_files() else count_by_torch()


@functools.cache
def count_by_torch() -> int:
    """Return what PyTorch counts, in a process of its own, since counting initializes CUDA; 0 if it can't."""
    environment = {name: value for name, value in os.environ.items() if name not in _LISTS}
    command = [sys.executable, "-c", _COUNT]
    with contextlib.suppress(OSError, ValueError, IndexError, subprocess.TimeoutExpired):
        done = subprocess.run(
            command, env=environment, cwd="/", capture_output=True, text=True, timeout=_COUNT_LIMIT, check=False
        )
        return int(done.stdout.split()[-1])
    return 0
