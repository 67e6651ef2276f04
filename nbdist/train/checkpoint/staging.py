"""Copies of tensors in CPU memory, from which a checkpoint is written while training changes the originals.

The copies are used again by the next save: fresh memory costs more time than the copying. Independent of files.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping

import torch
from torch.distributed.tensor import DTensor


@torch.no_grad()
def copy_to_cpu(tensors: Mapping[str, torch.Tensor], copies: MutableMapping[str, torch.Tensor]) -> None:
    """Bring copies up to date. Returns when the originals may change.

    Args:
        tensors: By name; shards are DTensors.
        copies: What an earlier call has filled, or nothing. What is not among the tensors is removed.
    """
    for name in copies.keys() - tensors.keys():
        del copies[name]
    for name, tensor in tensors.items():
        if name not in copies or _layout(copies[name]) != _layout(tensor):
            copies.pop(name, None)  # before there is another one: together they may not fit
            copies[name] = _empty_copy(tensor)
        _local(copies[name]).copy_(_local(tensor), non_blocking=True)
    if any(tensor.is_cuda for tensor in tensors.values()):
        torch.cuda.current_stream().synchronize()


def _layout(tensor: torch.Tensor) -> tuple[object, ...]:
    sharding = (tensor.device_mesh, tensor.placements) if isinstance(tensor, DTensor) else None
    return tensor.shape, tensor.dtype, sharding


def _empty_copy(tensor: torch.Tensor) -> torch.Tensor:
    copy = torch.empty_like(tensor.detach(), device="cpu")
    if not tensor.is_cuda:
        return copy
    pinned = torch.empty_like(_local(copy), pin_memory=True)  # else the GPU's copies wait for the CPU's
    if not isinstance(copy, DTensor):
        return pinned
    copy._local_tensor = pinned  # as torch's own staging does
    return copy


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
