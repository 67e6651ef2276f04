"""Rank 0 reads for all: each rank is handed its batch of every round. Independent of samplers, epochs or loaders.

For each round rank 0 tells all ranks what their batches look like, and that it could not read on if so; then the bytes
of all tensors of a rank's batch travel as one piece.
"""

from __future__ import annotations

import itertools
import pickle
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from nbdist.errors import UsageError
from nbdist.train.collective.nested import map_tensors
from nbdist.train.collective.participants import refuse_partial

_ALIGNMENT = 64  # bytes: tensors of any type can begin there


@dataclass(frozen=True)
class _Slot:
    """Where a tensor of a batch lies in the parcel."""

    offset: int
    shape: torch.Size
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return self.shape.numel() * self.dtype.itemsize


@dataclass(frozen=True)
class _Round:
    """What rank 0 tells of a round.

    Attributes:
        outlines: The batches, with slots for their tensors; fewer than ranks at the end.
        nbytes: Size of the largest parcel.
        remainder: Real samples of the round, if it is the last.
        error: The exception that kept rank 0 from reading on: pickled if possible, and as text.
    """

    outlines: tuple[Any, ...] = ()
    nbytes: int = 0
    remainder: int = -1
    error: tuple[bytes | None, str] | None = None


def dispatched(
    batches: Iterable[Any] | None,
    remainder: Callable[[], int],
    ended: Callable[[int], None],
    device: torch.device | None,
) -> Iterator[Any]:
    """Yield this rank's batches of what rank 0 reads. To be read on all ranks alike.

    Args:
        batches: On rank 0 the batches of all ranks in turn; None elsewhere.
        remainder: Tells on rank 0 how many samples of the last round are real.
        ended: Called on all ranks with that number when there are no more batches.
        device: Where this rank computes; None: on the CPU.

    Raises:
        Exception: What rank 0 has met while reading, on all ranks.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    refuse_partial("a loop over a loader with dispatch", world_size)
    reading = iter(batches) if batches is not None else None
    wire = torch.device("cpu") if device is None or "gloo" in dist.get_backend_config() else device
    while True:
        told, tensors = _heard() if reading is None else _read(reading, world_size, remainder)
        parcel = _scattered(tensors, told.nbytes, world_size, wire) if told.nbytes else torch.empty(0)
        last = len(told.outlines) < world_size
        if last:
            ended(told.remainder)
        if rank < len(told.outlines):
            yield _unpacked(told.outlines[rank], parcel)
        if last:
            return


def _read(
    batches: Iterator[Any], world_size: int, remainder: Callable[[], int]
) -> tuple[_Round, list[list[torch.Tensor]]]:
    """Read the next round on rank 0, announce it to all, and return the tensors of each batch."""
    try:
        packed = [_packed(batch) for batch in itertools.islice(batches, world_size)]
        nbytes = max((_end(tensors) for _, tensors in packed), default=0)
        mine = _Round(tuple(outline for outline, _ in packed), nbytes, remainder())
        message = _message(mine)
    except Exception as error:  # of the user's dataset; the others wait for a batch
        _tell(pickle.dumps(_Round(error=(_pickled(error), f"{type(error).__name__}: {error}"))))
        raise
    _tell(message)
    return mine, [tensors for _, tensors in packed]


def _message(mine: _Round) -> bytes:
    try:
        return pickle.dumps(mine)
    except Exception as error:  # what a batch holds raises what it likes
        raise UsageError(
            f"with dispatch, rank 0 sends batches to the other ranks, but this one can't be sent ({error}): let it "
            "hold only tensors and plain values, or plan dispatch=False"
        ) from error


def _heard() -> tuple[_Round, list[list[torch.Tensor]]]:
    """Return what rank 0 announces of the next round, on other ranks."""
    told: _Round = pickle.loads(_tell(None))
    if told.error is not None:
        raise _raised(*told.error)
    return told, []


def _tell(message: bytes | None) -> bytes:
    """Return what rank 0 says."""
    box: list[Any] = [message]
    dist.broadcast_object_list(box, src=0)
    told: bytes = box[0]
    return told


def _scattered(tensors: list[list[torch.Tensor]], nbytes: int, world_size: int, wire: torch.device) -> torch.Tensor:
    """Return this rank's parcel. All are of one size, as the collective wants it."""
    mine = torch.empty(nbytes, dtype=torch.uint8, device=wire)
    given = [_parcel(batch, nbytes).to(wire) for batch in tensors]
    if given:
        given += [given[-1]] * (world_size - len(given))  # ranks without a batch don't look at it
    dist.scatter(mine, given or None, src=0)
    return mine


def _packed(batch: Any) -> tuple[Any, list[torch.Tensor]]:
    """Return the outline of a batch, and its tensors. Tensors that are no plain memory stay in the outline."""
    tensors: list[torch.Tensor] = []

    def slot(tensor: torch.Tensor) -> Any:
        if tensor.layout != torch.strided or tensor.is_nested or tensor.is_quantized:
            return tensor
        place = _Slot(_end(tensors), tensor.shape, tensor.dtype)
        tensors.append(tensor)
        return place

    return map_tensors(slot, batch), tensors


def _end(tensors: list[torch.Tensor]) -> int:
    return sum(-(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT for tensor in tensors)


def _parcel(tensors: list[torch.Tensor], nbytes: int) -> torch.Tensor:
    parcel = torch.empty(nbytes, dtype=torch.uint8)
    offset = 0
    for tensor in tensors:
        plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
        parcel[offset : offset + tensor.nbytes] = plain.reshape(-1).view(torch.uint8)
        offset += -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
    return parcel


def _unpacked(outline: Any, parcel: torch.Tensor) -> Any:
    def tensor(slot: _Slot) -> torch.Tensor:
        return parcel[slot.offset : slot.offset + slot.nbytes].view(slot.dtype).view(slot.shape)

    return map_tensors(tensor, outline, lambda value: isinstance(value, _Slot))


def _pickled(error: Exception) -> bytes | None:
    """Return the exception as bytes, None if it would not come out of them again."""
    try:
        pickled = pickle.dumps(error)
        pickle.loads(pickled)
    except Exception:  # an exception's own pickling may fail in any way
        return None
    return pickled


def _raised(pickled: bytes | None, text: str) -> Exception:
    if pickled is not None:
        try:
            error = pickle.loads(pickled)
        except Exception:  # made here by the exception's own class
            error = None
        if isinstance(error, Exception):
            return error
    return RuntimeError(f"rank 0 could not read the next batch: {text}")
