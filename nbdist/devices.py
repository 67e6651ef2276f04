"""The GPUs of this machine, found without initialising CUDA. Knows nothing of ranks."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

_T = TypeVar("_T")

_WITHOUT_PEER_ACCESS = "RTX 40"
_FIRST_DRIVER = (550, 40, 7)  # the first that does not offer these GPUs what they lack
_WITHOUT_DIRECT_LINKS = {"NCCL_P2P_DISABLE": "1", "NCCL_IB_DISABLE": "1"}


def visible_gpus(environment: Mapping[str, str] = os.environ) -> list[str]:
    """The GPUs that CUDA would show under this environment, as CUDA_VISIBLE_DEVICES names them.

    Returns:
        Indices or UUIDs; empty without GPUs or without a driver.
    """
    count = _count()
    listed = environment.get("CUDA_VISIBLE_DEVICES")
    if listed is None:
        return [str(index) for index in range(count)]
    names = []
    for name in (part.strip() for part in listed.split(",")):
        if not name or (name.lstrip("-").isdigit() and not 0 <= int(name) < count):
            break  # CUDA itself stops at the first entry that it does not know
        names.append(name)
    return names if count else []


def nccl_variables(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """What NCCL must be told of this machine's GPUs, unless the user has told it.

    Drivers before 550.40.07 offer GeForce RTX 40 direct access to each other, which hangs; `accelerate launch` sets the
    same, and `Accelerator()` refuses to work without.

    Returns:
        Environment variables for ranks; empty for other GPUs and newer drivers.
    """
    unknown: tuple[list[str], str] = ([], "")
    names, driver = _ask_driver(_names_and_version, unknown)
    if len(names) < 2 or not any(_WITHOUT_PEER_ACCESS in name for name in names):
        return {}
    parts = tuple(int(part) for part in driver.split(".") if part.isdigit())
    if not parts or parts >= _FIRST_DRIVER:
        return {}
    return {name: value for name, value in _WITHOUT_DIRECT_LINKS.items() if name not in environment}


def _names_and_version(nvml: Any) -> tuple[list[str], str]:
    handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(int(nvml.nvmlDeviceGetCount()))]
    return [_text(nvml.nvmlDeviceGetName(handle)) for handle in handles], _text(nvml.nvmlSystemGetDriverVersion())


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


def _count() -> int:
    return _ask_driver(lambda nvml: int(nvml.nvmlDeviceGetCount()), 0)


def _ask_driver(question: Callable[[Any], _T], otherwise: _T) -> _T:
    """The driver's answer; `otherwise` without a driver, or from one that does not work."""
    try:
        import pynvml

        pynvml.nvmlInit()
        try:
            return question(pynvml)
        finally:
            pynvml.nvmlShutdown()
    except Exception:
        return otherwise
