"""Parameters of DeepSpeed's ZeRO: some are partitioned, and empty outside of a forward; others are copies.

To torch they all look like whole parameters.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from nbdist.errors import UsageError


def refuse_partitioned(function: str, tensors: Iterable[torch.Tensor]) -> None:
    """Raise an error where a tensor is a parameter that ZeRO-3 has partitioned and not gathered.

    Args:
        function: What was to read them.
        tensors: What it was given.

    Raises:
        UsageError: One is partitioned. The text says what to do instead.
    """
    for tensor in tensors:
        whole = getattr(tensor, "ds_shape", None)
        if whole is not None and tuple(whole) != tuple(tensor.shape):
            raise UsageError(
                f"{function} needs whole parameters, and ZeRO-3 has partitioned these: gather them around the call "
                "with `with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):`, "
                "or save a checkpoint with `engine.save_checkpoint(...)`"
            )


def refuse_overruled(function: str, tensors: Iterable[torch.Tensor]) -> None:
    """Raise an error where a tensor is partitioned, or a parameter that ZeRO's next step overwrites.

    Args:
        function: What was to write them.
        tensors: What it was given.

    Raises:
        UsageError: One is. The text says what to do instead.
    """
    tensors = list(tensors)
    if any(hasattr(tensor, "_z3_optimizer") or hasattr(tensor, "get_full_hp_param") for tensor in tensors):
        raise UsageError(
            f"{function} can't set parameters of a DeepSpeed engine with ZeRO, which keeps their values in its "
            f"optimizer: call {function} before `deepspeed.initialize`, or `engine.load_checkpoint(...)`"
        )
    refuse_partitioned(function, tensors)
