"""What DeepSpeed keeps for the whole process: it goes when the ranks are no longer those of before.

Ranks that know of earlier groups would not make those that a new rank makes in its `deepspeed.initialize`, and it would
wait for them. Does nothing where DeepSpeed isn't imported.
"""

from __future__ import annotations

import sys
from typing import Any

_GROUPS = (
    "_DATA_PARALLEL_GROUP",
    "_MODEL_PARALLEL_GROUP",
    "_MPU_TENSOR_MODEL_PARALLEL_RANK",
    "_MPU_TENSOR_MODEL_PARALLEL_WORLD_SIZE",
    "_TENSOR_MODEL_PARALLEL_GROUP",
    "_WORLD_GROUP",
    "_ZERO_PARAM_INTRA_PARALLEL_GROUP",
    "mesh_device",
    "mpu",
)
_BY_NAME = (
    "_ALL_TO_ALL_GROUP",
    "_EXPERT_DATA_PARALLEL_GROUP",
    "_EXPERT_DATA_PARALLEL_GROUP_RANKS",
    "_EXPERT_PARALLEL_GROUP",
    "_EXPERT_PARALLEL_GROUP_RANKS",
)


def forget_groups() -> None:
    """Have DeepSpeed make its groups again in the next `deepspeed.initialize`. Engines keep those that they have."""
    known: Any = sys.modules.get("deepspeed.utils.groups")
    if known is None:
        return
    for name in _GROUPS:
        if hasattr(known, name):
            setattr(known, name, None)
    for name in _BY_NAME:
        getattr(known, name, {}).clear()


def forget_ranks() -> None:
    """Have it also connect to the ranks again, as a new rank does. Engines of before can't be used any more."""
    forget_groups()
    communication: Any = sys.modules.get("deepspeed.comm.comm")
    if communication is not None:
        communication.cdb = None
    partitioning: Any = sys.modules.get("deepspeed.runtime.zero.partition_parameters")
    if partitioning is not None:
        _restore_linear(getattr(partitioning, "InsertPostInitMethodToModuleSubClasses", None))
        _number_from_0(partitioning.Init)


def _number_from_0(numbered: Any) -> None:
    """Have ZeRO-3 number parameters and modules as on a new rank: it compares the numbers between ranks."""
    numbered.param_id = 0
    offload = getattr(sys.modules.get("deepspeed.runtime.zero.parameter_offload"), "DeepSpeedZeRoOffload", None)
    for default in getattr(getattr(offload, "_register_deepspeed_module", None), "__defaults__", None) or ():
        if isinstance(default, list):  # its counter
            default[:] = [0]


def _restore_linear(patches: Any) -> None:
    """Take back what ZeRO-3 leaves in place of `linear`: with it, gradients come in another order than on a new rank.

    ZeRO-1 and 2 exchange them in the order in which they come, so gradients of different parameters would be summed.
    """
    original = getattr(patches, "linear_bk", None)
    if original is not None:
        import torch.nn.functional

        torch.nn.functional.linear = original
