"""Parts of packed matrices in checkpoints: of each matrix its rows, where they belong in the whole.

A rank that divides experts has some rows of each matrix that is packed in a parameter, next to each other in its
memory. torch takes what a rank has for one piece of the whole; here it learns that these are several.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor, Shard


def in_pieces(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return tensors as `torch.distributed.checkpoint` can save them, and load into them: the memory is the same.

    Args:
        tensors: By name; shards are DTensors.
    """
    return {name: _in_pieces(tensor) for name, tensor in tensors.items()}


def _in_pieces(tensor: torch.Tensor) -> torch.Tensor:
    if not isinstance(tensor, DTensor) or not (packed := _packed(tensor)):
        return tensor
    local = tensor.to_local().detach()
    presented: Any = tensor.detach()
    pieces = local.as_subclass(_Pieces)
    pieces.whole, pieces.pieces = tensor.shape, _pieces(tensor, local, packed)
    presented._local_tensor = pieces  # as torch's own wrappers of several shards
    return presented  # type: ignore[no-any-return]


def _packed(tensor: DTensor) -> dict[int, int]:
    """Return how many matrices are packed in which dimension, by the dimension of the mesh that divides them."""
    placements: Sequence[Any] = tensor.placements
    contiguous = {placement.dim for placement in placements if type(placement) is Shard}
    return {
        axis: placement.split_factor
        for axis, placement in enumerate(placements)
        if hasattr(placement, "split_factor") and placement.dim not in contiguous
    }


@dataclass(frozen=True)
class _Piece:
    offsets: torch.Size
    values: torch.Tensor


class _Pieces(torch.Tensor):
    """A rank's part of a tensor, which is several pieces of it. Speaks torch's protocol of checkpoints."""

    whole: torch.Size
    pieces: list[_Piece]

    def __create_write_items__(self, name: str, tensor: object) -> list[WriteItem]:
        properties = TensorProperties.create_from_tensor(self.as_subclass(torch.Tensor))
        return [
            WriteItem(
                index=MetadataIndex(name, piece.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=_chunk(piece), properties=properties, size=self.whole),
            )
            for piece in self.pieces
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [_chunk(piece) for piece in self.pieces]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        return next(piece.values for piece in self.pieces if piece.offsets == index.offset)


def _chunk(piece: _Piece) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(offsets=piece.offsets, sizes=piece.values.size())


def _pieces(tensor: DTensor, local: torch.Tensor, packed: Mapping[int, int]) -> list[_Piece]:
    (axis, matrices), *_ = packed.items()  # a plan of tp has one such dimension
    mesh, placements = tensor.device_mesh, tensor.placements
    offsets, sizes = [0] * tensor.dim(), list(tensor.shape)
    for number, placement in enumerate(placements):
        if type(placement) is Shard:
            length = -(-sizes[placement.dim] // mesh.size(number))  # as torch.chunk cuts
            skipped = min(sizes[placement.dim], length * mesh.get_local_rank(number))
            offsets[placement.dim] += skipped
            sizes[placement.dim] = min(length, sizes[placement.dim] - skipped)
    dimension: Any = getattr(placements[axis], "dim", None)
    length = tensor.shape[dimension] // matrices
    own = length // mesh.size(axis)
    found = []
    for number, values in enumerate(local.split(own, dimension)):
        offsets[dimension] = number * length + mesh.get_local_rank(axis) * own
        found.append(_Piece(torch.Size(offsets), values))
    return [piece for piece in found if piece.values.numel()]
