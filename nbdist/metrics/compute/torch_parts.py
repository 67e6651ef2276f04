"""The private parts of torch that steps are seen and counted by, and which of them this version lacks.

They are used where users' own code runs, so all are looked for before the first is used.
"""

from __future__ import annotations

import functools

import torch

_NEEDED = (
    "torch.autograd._engine_run_backward",
    "torch._C._autograd._get_sequence_nr",
    "torch._C._current_autograd_node",
    "torch._C._current_graph_task_id",
    "torch._C._dispatch_has_kernel_for_dispatch_key",
    "torch._C._get_dispatch_stack_at",
    "torch._C._len_torch_dispatch_stack",
    "torch._ops.HigherOrderOperator",
    "torch._ops.OpOverload",
    "torch._ops.OpOverloadPacket",
)


@functools.cache
def lacking() -> str:
    """Return the first that this version lacks, with the version; empty: it has all."""
    missing = next((name for name in _NEEDED if not _exists(name)), "")
    return f"PyTorch {torch.__version__} has no {missing}" if missing else ""


def _exists(name: str) -> bool:
    found: object = torch
    for part in name.split(".")[1:]:
        if not hasattr(found, part):
            return False
        found = getattr(found, part)
    return True
