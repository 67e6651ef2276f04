"""The warm template's first moments: one thread that imports everything, but none of the user's code.

It imports almost nothing before torch. It never runs a tensor operation (OpenMP threads don't survive a fork) and
never touches CUDA. What it does afterwards is in `forking`.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib.util
import os
import signal
import socket
import sys
import threading
import traceback
from pathlib import Path

# While torch's largest library is loading no other can: load the others before, and pure Python meanwhile.
_BEFORE_MAPPING = ("cmath", "decimal", "fcntl", "random", "shutil", "subprocess", "unicodedata")
_WHILE_MAPPING = "sympy"
# What ranks will need, such as stack_data and pygments for the first traceback.
_PRELOADED = (
    "numpy",
    "torch",
    "torch.distributed",
    "torch.nn.parallel",
    "torch.utils.data",
    "IPython.core.interactiveshell",
    "IPython.core.magics.execution",
    "stack_data",
    "pygments.formatters.html",
    "pygments.formatters.terminal256",
    "pygments.lexers.python",
    "nbdist.worker.rank",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "torch.distributed.checkpoint",
)
_PRELOADED_IF_THERE = ("torch._dynamo", "torch.profiler._cupti_monitor")  # which torch's first optimizer step imports


def main() -> None:
    """Run the template. Arguments: the descriptor of its channel to the agent, then `sys.path` (none to keep it)."""
    channel = socket.socket(fileno=int(sys.argv[1]))
    sys.path[:] = sys.argv[2:] or sys.path
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    gc.disable()  # imports create half a million objects that are never freed
    try:
        origin = _preload()
        from nbdist.agent.forks.forking import Template
    except Exception as error:  # an import runs anybody's code; the agent is told
        from nbdist.wire.processes.template_messages import ImportFailed, encode

        channel.send(encode(ImportFailed(_describe_import_failure(error))))
        return
    # Not collected first: the little garbage from imports is shared by all ranks, and finding it takes 0.2 s.
    gc.freeze()  # otherwise each rank's first collection would copy every page (37 MB per rank)
    Template(channel).serve(origin)


def _preload() -> str:
    for module in _BEFORE_MAPPING:
        __import__(module)
    spec = importlib.util.find_spec("torch")
    if spec is not None and spec.origin is not None:
        meanwhile = threading.Thread(target=__import__, args=(_WHILE_MAPPING,))
        meanwhile.start()
        _map_torch_library(spec.origin)  # in this thread: torch's profiler complains in any other
        meanwhile.join()
    for module in _PRELOADED:
        __import__(module)
    for module in _PRELOADED_IF_THERE:
        with contextlib.suppress(ImportError):
            __import__(module)
    _prepare_shell()
    return str(sys.modules["torch"].__file__)


def _map_torch_library(torch: str) -> None:
    """Load torch's largest library while a second core handles other imports (saves 0.2 s)."""
    libc = ctypes.CDLL(None)
    libc.dlopen.restype = ctypes.c_void_p
    # A foreign call lets other threads run, which `CDLL(...)` does not. If it fails, the import will report it.
    libc.dlopen(str(Path(torch).parent / "lib" / "libtorch_cpu.so").encode(), os.RTLD_NOW | os.RTLD_GLOBAL)


def _prepare_shell() -> None:
    """Create the shell once for all ranks: it takes longer than the rest of a rank's start (30 ms)."""
    from nbdist.worker.cell.shell import RankShell

    RankShell.prepare()


_AGAIN = "`%distributed start` again."


def _describe_import_failure(error: Exception) -> str:
    if isinstance(error, ModuleNotFoundError) and error.name == "torch":
        return f"PyTorch is not installed for {sys.executable}. Type `%pip install torch`, then {_AGAIN}"
    last = traceback.format_exception_only(error)[-1].strip()
    return f"the ranks' imports failed: {last}. Fix the installation for {sys.executable} (`%pip check`), then {_AGAIN}"
