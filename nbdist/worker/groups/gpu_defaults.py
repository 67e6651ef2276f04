"""What ranks on GPUs have in their environment unless the user has set it, and why.

Libraries read these before any code of a cell's could set them, or only once in a process. Imports no torch.
"""

from __future__ import annotations

import platform
from collections.abc import Mapping

ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")

# The name to set, other names by which the user may have decided, the value.
_DEFAULTS = (
    # NCCL's watchdog ends the process when a collective times out or a peer fails, and the rank's variables with it.
    # nbdist watches the ranks itself, and frees those that wait for what can't come.
    ("TORCH_NCCL_ASYNC_ERROR_HANDLING", ("NCCL_ASYNC_ERROR_HANDLING",), "0"),
    # Another thread of its ends the process when the watchdog is stuck, for example while a CUDA call holds the GIL.
    ("TORCH_NCCL_ENABLE_MONITORING", (), "0"),
    # It also ends the process when a kernel has failed, as on an index out of range, before that can be reported.
    ("TORCH_NCCL_RETHROW_CUDA_ERRORS", (), "0"),
    # torch reads it in the first matrix product of a process: a deterministic plan in a later cell would be refused.
    # On H100 it is the size that torch uses anyway, on older GPUs it takes 24 MiB more.
    ("CUBLAS_WORKSPACE_CONFIG", (), ":4096:8"),
)
_SEGMENTS = "expandable_segments:True"
_REGISTERS = "TORCH_NCCL_USE_TENSOR_REGISTER_ALLOCATOR_HOOK"  # which torch ignores when segments may grow


def gpu_defaults(given: Mapping[str, str], kernel: str = "") -> dict[str, str]:
    """Return the variables to add for ranks on GPUs.

    Args:
        given: The user's environment. What it decides stays.
        kernel: Release of the system's kernel; empty: this one's.
    """
    found = {name: value for name, others, value in _DEFAULTS if not any(each in given for each in (name, *others))}
    if _may_expand(given, kernel or platform.release()):
        found[ALLOCATOR_VARIABLES[1]] = _SEGMENTS  # the name that torch 2.8 knows, too
    return found


def _may_expand(given: Mapping[str, str], kernel: str) -> bool:
    """Return whether the allocator may let its segments grow, so that tensors of changing sizes leave no holes.

    Models that are gathered block by block, and batches of different lengths, otherwise end in "out of memory" with
    gigabytes reserved and not allocated. Windows' driver (WSL) does not offer what it takes.
    """
    decided = any(name in given for name in (*ALLOCATOR_VARIABLES, _REGISTERS))
    return not decided and "microsoft" not in kernel.lower()
