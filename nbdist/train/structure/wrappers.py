"""Tensors that are made of several others, as quantized weights are."""

from __future__ import annotations

import torch


def is_wrapper(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is made of several others: its class follows torch's protocol for taking it apart."""
    kind = type(tensor)
    return kind is not torch.Tensor and hasattr(kind, "__tensor_flatten__") and hasattr(kind, "__tensor_unflatten__")
