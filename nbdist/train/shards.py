"""Shards that have changed: what FSDP2 gathered of them before is out of date. Knows nothing of who changes them."""

from __future__ import annotations

from torch import nn


def gather_again(model: nn.Module) -> None:
    """Let FSDP2 gather a model's parameters again when they are next needed.

    After a forward without gradients the outermost module still holds whole ones, and would go on with these.
    """
    from torch.distributed.fsdp import FSDPModule

    for part in model.modules():
        if isinstance(part, FSDPModule):
            part.reshard()
