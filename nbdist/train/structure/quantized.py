"""Tensors that are made of several others, as quantized weights; how checkpoints hold quantized optimizer state.

They hold the values of such state, in the type that it stands for, since blocks of codes can't be divided among other
ranks. Codes that values are brought back into may differ in the last place: torchao's scale of a block is its largest
value, and in maps of 8 and 4 bits the largest negative number has no code of its own.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor

from nbdist.errors import UsageError


def is_wrapper(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is made of several others: its class follows torch's protocol for taking it apart."""
    kind = type(tensor)
    return kind is not torch.Tensor and hasattr(kind, "__tensor_flatten__") and hasattr(kind, "__tensor_unflatten__")


def is_quantized(value: torch.Tensor) -> bool:
    """Return whether a tensor, or the shard of one, keeps codes instead of values."""
    local = _local(value)
    return is_wrapper(local) and type(local).dequantize is not torch.Tensor.dequantize


def is_signed(value: torch.Tensor) -> bool:
    """Return whether quantized values may be negative; where that makes no difference, True."""
    return bool(getattr(_local(value), "signed", True))


def values_of(value: torch.Tensor) -> torch.Tensor:
    """Return what quantized state stands for; of a shard a shard."""
    plain: torch.Tensor = _local(value).dequantize().to(value.dtype)
    if not isinstance(value, DTensor):
        return plain
    layout: dict[str, Any] = {"shape": value.shape, "stride": value.stride()}
    return DTensor.from_local(plain, value.device_mesh, value.placements, run_check=False, **layout).to(plain.device)


def refuse_unquantizable(optimizer: torch.optim.Optimizer) -> None:
    """Refuse an optimizer that can't take back what a checkpoint holds of quantized state.

    Raises:
        UsageError: With the class of the optimizer.
    """
    if not callable(getattr(optimizer, "_new_buffer", None)):
        raise UsageError(
            f"the checkpoint is of an optimizer with quantized state, such as torchao's AdamW8bit, and "
            f"{type(optimizer).__name__} has none: make the same optimizer as when it was saved. Nothing was loaded"
        )


def quantized(optimizer: Any, parameter: torch.Tensor, values: torch.Tensor, signed: bool) -> torch.Tensor:
    """Return values as an optimizer of torchao keeps them for a parameter; as they are where it keeps small ones so."""
    kept: torch.Tensor = optimizer._new_buffer(parameter.detach(), signed)
    with torch.no_grad():
        _local(kept).copy_(_local(values))
    return kept


def _local(tensor: torch.Tensor) -> torch.Tensor:
    local: torch.Tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local
