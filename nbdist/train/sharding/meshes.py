"""Device meshes of this process. Each is made once: its process groups hold threads, files and memory of the device.

Independent of plans or models.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch.distributed as dist

from nbdist.train.collective.agreement import gather

_meshes: dict[Hashable, Any] = {}
_world: Any = None  # the default group that they were made in


def kept(key: Hashable, make: Callable[[], Any]) -> Any:
    """Return the mesh of this key, made if not all ranks have it. To be called on all ranks, with the same key."""
    global _world
    if dist.group.WORLD is not _world:
        _meshes.clear()
        _world = dist.group.WORLD
    if not all(gather(key in _meshes and _is_usable(_meshes[key]))):
        _meshes[key] = make()
    return _meshes[key]


def _is_usable(mesh: Any) -> bool:
    """Return whether its groups are there: one that was interrupted while it was made, or lost a rank, is not."""
    try:
        return all(dist.get_rank(group) >= 0 for group in mesh.get_all_groups())
    except (ValueError, RuntimeError, KeyError):
        return False
