"""Packages for tests of the CUDA guard: a torch that takes itself for one with CUDA, and libraries that use it.

- Counting devices is enough to spoil CUDA in processes forked later (torch/csrc/cuda/Module.cpp: `poison_fork`, which
  `THCPModule_getDeviceCount_wrap` calls, too), and `_cuda_isInBadFork` says so in the child alone.
- Everything else of the initialization is torch's own: `torch.cuda._lazy_init` runs as it is.
- NVML shows another process on each GPU, and this one where it has a context.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from testbed.nvml import GIB, as_module, machine

# The CPU build's own `_lazy_init` runs, with stand-ins for the functions that only a CUDA build has.
PRETEND = """
import os, types
import torch

spoiled = bad_fork = False

def touch(answer=None):
    global spoiled
    spoiled = True
    return answer

def forked():
    global bad_fork
    bad_fork = spoiled

os.register_at_fork(after_in_child=forked)
torch._C._cuda_getDeviceCount = lambda: touch(1)
torch._C._cuda_init = touch
torch._C._cuda_isInBadFork = torch.cuda._is_in_bad_fork = lambda: bad_fork
torch.cuda._is_compiled = lambda: True
torch.cuda._cudart = object()
torch.cuda._queued_calls[:] = [call for call in torch.cuda._queued_calls if call[0].__module__ == "nbdist.cuda_guard"]
torch.cuda.device_count = lambda: 1
torch.cuda.get_device_properties = lambda index: types.SimpleNamespace(uuid="uuid-1")
torch.cuda.memory_reserved = lambda index: 2**30
"""

CEXTENSION = """import torch


def probe():
    torch.cuda._lazy_init()

probe()
"""

HELPER = """import torch

class Model:
    def put(self):
        torch.cuda._lazy_init()
"""


def seen_by_nvml(gpus: Sequence[int | None]) -> dict[str, Any]:
    """A machine as NVML sees it. The argument is that of `write_packages`."""
    found = machine(len(gpus), processes={"1": 8 * GIB})
    for index, held in enumerate(gpus):
        found["gpus"][index]["uuid"] = f"GPU-uuid-{index}"
        if held is not None:
            found["gpus"][index]["processes"] = {"1": 8 * GIB, "self": held}
    return found if gpus else {**found, "init": "DRIVER_NOT_LOADED"}


def write_packages(folder: Path, gpus: Sequence[int | None] = (None,)) -> None:
    """Write them into a folder that is to be on the program's path.

    Args:
        folder: The folder.
        gpus: What NVML says of each GPU: the bytes that the program itself holds there, None if it has no context.
            Without any there is no driver. On each there is another process, too.
    """
    as_module(folder, seen_by_nvml(gpus))
    for file, text in {
        "pretend.py": PRETEND,
        "helper.py": HELPER,
        "bitsandbytes/__init__.py": "from . import cextension\n",
        "bitsandbytes/cextension.py": CEXTENSION,
        "peft/__init__.py": "from peft.tuners import lora\n",
        "peft/tuners/__init__.py": "",
        "peft/tuners/lora.py": "import importlib\nimportlib.import_module('bitsandbytes')\n",
    }.items():
        path = folder / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
