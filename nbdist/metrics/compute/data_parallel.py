"""Which part of the data a rank trains on, by what DDP and FSDP2 say: equal batches may be dummy data.

Dummy data, or the same seed everywhere, is equal on ranks that all the same count each batch.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator
from typing import Any

import torch

from nbdist.metrics.compute import waits


def shared_batch(batch: str, parameters: Collection[torch.Tensor]) -> str:
    """Return what is equal on ranks that share a batch, and on no others; empty where nothing shows that they may.

    Args:
        batch: Stands for the values of the batch; empty: not known.
        parameters: What the rank trains.
    """
    if not batch:
        return ""
    if places := sorted(set(_places({id(parameter) for parameter in parameters}))):
        return f"{places} {batch}"
    return batch if any(map(_is_sharded, parameters)) else ""


def _is_sharded(parameter: torch.Tensor) -> bool:
    """Return whether it is a DTensor: FSDP's aside, that is tensor parallelism."""
    return hasattr(parameter, "device_mesh")


def _places(parameters: Collection[int]) -> Iterator[tuple[int, ...]]:
    """Yield this rank's place among those that average the gradients of any of these parameters, by their ids."""
    for model in waits.ddp_models():
        if any(id(parameter) in parameters for parameter in model.module.parameters()):
            yield (model.process_group.rank(),)
    for group in _fsdp_groups():
        if any(id(each.sharded_param) in parameters for each in group.fsdp_params):
            mesh = group.mesh_info
            yield (getattr(mesh, "replicate_mesh_rank", 0), getattr(mesh, "shard_mesh_rank", 0))


def _fsdp_groups() -> Iterator[Any]:
    """Yield the groups of parameters that `fully_shard` has made in this process."""
    states = getattr(sys.modules.get("torch.distributed._composable_state"), "_module_state_mapping", {})
    for reference in list(states.values()):
        yield from getattr(reference(), "_fsdp_param_groups", ())
