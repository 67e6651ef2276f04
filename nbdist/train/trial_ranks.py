"""Whether ranks are processes, or only numbers in an estimate."""

from __future__ import annotations

import torch.distributed as dist


def have_values(group: dist.ProcessGroup | None = None) -> bool:
    """Return whether tensors have values: in an estimate, whose ranks are no processes, they have none."""
    return dist.get_backend(group) != "fake"
