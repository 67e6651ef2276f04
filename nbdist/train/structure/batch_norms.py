"""What is a BatchNorm layer: of any number of dimensions, synchronized or not, built lazily or not."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.nn.modules import batchnorm


def is_batch_norm(module: object) -> bool:
    """Return whether a module is one."""
    return isinstance(module, _KINDS)


# Their common class is private; without it those that are built lazily are none until they are built.
_KINDS: Any = getattr(batchnorm, "_BatchNorm", (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm))
