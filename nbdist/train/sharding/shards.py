"""Shards that have changed: what FSDP2 gathered of them before is out of date. Knows nothing of who changes them."""

from __future__ import annotations

import sys

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
