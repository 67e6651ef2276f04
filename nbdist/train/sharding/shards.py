"""What FSDP2 has gathered and must drop: parameters whose shards have changed, gradients of a step that was given up.

The latter leans on private parts of torch, as there is no public way.
"""

from __future__ import annotations

import sys
from typing import Any

from torch import nn


def gather_again(model: nn.Module) -> None:
    """Let FSDP2 gather a model's parameters again when they are next needed.

    After a forward without gradients the outermost module still holds whole ones, and would go on with these.
    """
    sharded = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", None)
    if sharded is None:  # nothing here is
        return
    for part in model.modules():
        if isinstance(part, sharded):
            part.reshard()


def parameter_groups(state: Any) -> list[Any]:
    """Return the groups of parameters of one FSDP2 module, by its state; newer torches may have several."""
    found = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
    return [group for group in found if group is not None]


def drop_unexchanged(group: Any) -> None:
    """Drop what a group's parameters have gathered since their gradients were last exchanged."""
    for parameter in group.fsdp_params:
        if not isinstance(getattr(type(parameter), "unsharded_accumulated_grad", None), property):
            parameter.unsharded_accumulated_grad = None
        if hasattr(parameter, "_unsharded_param"):
            parameter._unsharded_param.grad = None
