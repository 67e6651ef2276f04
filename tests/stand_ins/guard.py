"""Packages for tests of the CUDA guard: a torch that takes itself for one with CUDA, and libraries that use it."""

from __future__ import annotations

from pathlib import Path

# The CPU build's own `_lazy_init` runs, with stand-ins for the functions that only a CUDA build has. As in that build,
# counting devices is enough to spoil CUDA in processes forked later.
PRETEND = """
import json, os, types
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

NVML = """
import json, os, types

gpus = json.loads(os.environ.get("PRETEND_GPUS", "[]"))

def nvmlInit():
    if not gpus:
        raise RuntimeError("Driver Not Loaded")

def nvmlShutdown(): pass
def nvmlDeviceGetCount(): return len(gpus)
def nvmlDeviceGetHandleByIndex(index): return index
def nvmlDeviceGetUUID(index): return f"GPU-uuid-{index}"

def nvmlDeviceGetComputeRunningProcesses(index):
    stranger = types.SimpleNamespace(pid=1, usedGpuMemory=2**33)
    own = types.SimpleNamespace(pid=os.getpid(), usedGpuMemory=gpus[index])
    return [stranger] if gpus[index] is None else [stranger, own]
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


def write_packages(folder: Path) -> None:
    """Write them into a folder that is to be on the program's path."""
    for file, text in {
        "pretend.py": PRETEND,
        "pynvml.py": NVML,
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
