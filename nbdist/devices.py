"""The GPUs of this machine, found without initialising CUDA. Knows nothing of ranks."""

from __future__ import annotations

import os
from collections.abc import Mapping


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


def _count() -> int:
    try:
        import pynvml

        pynvml.nvmlInit()
        try:
            return int(pynvml.nvmlDeviceGetCount())
        finally:
            pynvml.nvmlShutdown()
    except Exception:  # no driver, or one that does not work
        return 0
