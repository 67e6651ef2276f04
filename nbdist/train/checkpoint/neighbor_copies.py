"""The training's state in memory: each rank keeps its own part, and that of the rank before it.

A rank that replaces a dead one gets its part from the next rank, and the others go back to theirs: a checkpoint without
a disk, for shards of which there is no replica. Two versions are kept until all ranks have the newer one, so a death in
between leaves the older one whole. Independent of sessions or of who has died.
"""

from __future__ import annotations

import pickle
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from nbdist.base.text import duration, size
from nbdist.errors import UsageError
from nbdist.train.checkpoint.state_snapshot import Restoring, take
from nbdist.train.collective import agreement, meeting
from nbdist.train.loop import averages
from nbdist.train.sharding.zero_engine import engines_among
from nbdist.train.state import State, current, rank, world_size

_CHUNK = 64 << 20  # bytes that are sent at once
_ALIGNMENT = 16  # of tensors in a part, in bytes: what any dtype needs


@dataclass(frozen=True)
class ReplicaReport:
    """What `replicate` has done. It prints as one line.

    Attributes:
        steps: Optimizer steps that had been made.
        bytes: The size of this rank's part. A rank holds its own and one other; twice that while `replicate` runs.
        seconds: What it took.
    """

    steps: int
    bytes: int
    seconds: float

    def __repr__(self) -> str:
        return f"step {self.steps:,}: {size(self.bytes)} also on the next rank, in {duration(self.seconds)}"


@dataclass(frozen=True)
class _Part:
    """What one rank needs to go on after some steps. data: an outline of `outline` bytes, then the tensors."""

    steps: int
    outline: int
    data: torch.Tensor


@dataclass
class Copies:
    """What this rank keeps, by the number of steps: its own parts, and those of the rank before it."""

    own: dict[int, _Part] = field(default_factory=dict)
    other: dict[int, _Part] = field(default_factory=dict)


def replicate(state: State | None = None) -> ReplicaReport:
    """Keep this rank's part of the training in memory, and a copy of it on the next rank. To be called on all ranks.

    >>> if step % 10 == 0:
    ...     nbdist.replicate()

    Call it between optimizer steps, as often as steps may be lost. It keeps what `save_state` would write, in CPU
    memory. When a rank has died and `%distributed heal` has replaced it, `nbdist.resume()` brings all ranks back to the
    last copy; with `--on-death heal` that happens by itself. Two ranks that follow each other must not die at once.

    Args:
        state: The training; the current one by default.

    Returns:
        How much was copied, and how long that took.

    Raises:
        UsageError: Nothing is prepared, or not all ranks have called it.
    """
    began = time.perf_counter()
    state = state or current()
    meeting.meet("replicate", {})
    with agreement.together():
        averages.refuse_inside("replicate", state)
        if engines_among(state.models):
            raise UsageError("replicate can't copy what a DeepSpeed engine holds: write nbdist.save_state() instead")
        snapshot = take(state)
        if not snapshot.tensors:
            raise UsageError("nothing is prepared, so there is nothing to keep: call nbdist.prepare(model, ...) first")
        mine = _pack(state.steps, snapshot.tensors, snapshot.values)
    copies = state.neighbor_copies = state.neighbor_copies or Copies()
    copies.own[mine.steps] = mine
    if world_size() > 1:
        copies.other[mine.steps] = _pass_on(mine)
        agreement.all_numbers(mine.steps)  # all have theirs: now the ones before may go
    copies.own = {mine.steps: mine}
    copies.other = {steps: part for steps, part in copies.other.items() if steps == mine.steps}
    return ReplicaReport(mine.steps, mine.data.nbytes, time.perf_counter() - began)


def restore_copies(state: State, *, newcomer: bool) -> int | None:
    """Bring all ranks back to the newest copy that all have, or can get. To be called on all ranks.

    Args:
        state: The training.
        newcomer: Whether this rank has none, as it has replaced one that died.

    Returns:
        The number of optimizer steps; None if there is no such copy, and nothing has changed.
    """
    copies = state.neighbor_copies or Copies()
    sizes = {steps: (part.outline, part.data.nbytes) for steps, part in copies.other.items()}
    told = agreement.gather((newcomer, sorted(copies.own), sizes))
    steps = newest_on_all([(new, own, list(other)) for new, own, other in told])
    if steps is None:
        return None
    for taker, (is_new, _, _) in enumerate(told):
        holder = (taker + 1) % len(told)
        if is_new and rank() in (taker, holder):
            outline, length = told[holder][2][steps]
            part = copies.other[steps] if rank() == holder else _Part(steps, outline, _room(length))
            _give(part.data, holder, taker)
            if rank() == taker:
                copies.own[steps] = part
    with agreement.together():
        _unpack(copies.own[steps], state)
    part = copies.own[steps]
    state.neighbor_copies = Copies({steps: part}, {steps: _pass_on(part)})  # a newcomer has no other's yet
    return steps


def newest_on_all(told: Sequence[tuple[bool, Sequence[int], Sequence[int]]]) -> int | None:
    """Return the most steps of which every rank has its own part, a newcomer's being on the rank after it."""

    def has(number: int, steps: int) -> bool:
        is_new, own, _ = told[number]
        after_is_new, _, other = told[(number + 1) % len(told)]
        return (not after_is_new and steps in other) if is_new else steps in own

    known = {steps for _, own, _ in told for steps in own}
    return max((steps for steps in known if all(has(number, steps) for number in range(len(told)))), default=None)


# --- a part, as bytes


def _pack(steps: int, tensors: Mapping[str, torch.Tensor], values: Mapping[str, Any]) -> _Part:
    locals_ = {name: _local(tensor) for name, tensor in tensors.items()}
    forms = {name: (tensors[name].shape, local.shape, local.dtype) for name, local in locals_.items()}
    outline = pickle.dumps((forms, values))
    offsets, length = _offsets(len(outline), {name: local.nbytes for name, local in locals_.items()})
    data = _room(length)
    data[: len(outline)] = torch.frombuffer(bytearray(outline), dtype=torch.uint8)
    for name, local in locals_.items():
        flat = local.resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
        data[offsets[name] : offsets[name] + local.nbytes].copy_(flat)
    return _Part(steps, len(outline), data)


def _unpack(part: _Part, state: State) -> None:
    forms, values = pickle.loads(part.data[: part.outline].numpy().tobytes())
    lengths = {name: shape.numel() * dtype.itemsize for name, (_, shape, dtype) in forms.items()}
    offsets, _ = _offsets(part.outline, lengths)
    restoring = Restoring(state, values, {name: whole for name, (whole, _, _) in forms.items()})
    slots = restoring.slots({name: (whole, dtype) for name, (whole, _, dtype) in forms.items()})
    for name, slot in slots.items():
        _, shape, dtype = forms[name]
        kept = part.data[offsets[name] : offsets[name] + lengths[name]].view(dtype).reshape(shape)
        _local(slot).copy_(kept)
    restoring.finish(slots, None, [])


def _offsets(start: int, lengths: Mapping[str, int]) -> tuple[dict[str, int], int]:
    """Return where each tensor lies, and the length of all."""
    offsets = {}
    for name, length in lengths.items():
        offsets[name] = start = -(-start // _ALIGNMENT) * _ALIGNMENT
        start += length
    return offsets, start


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


def _room(length: int) -> torch.Tensor:
    return torch.empty(length, dtype=torch.uint8)


# --- between ranks


def _pass_on(mine: _Part) -> _Part:
    """Give a part to the next rank, and take that of the rank before."""
    after, before = (rank() + 1) % world_size(), (rank() - 1) % world_size()
    lengths, outlines = agreement.all_numbers(mine.data.nbytes), agreement.all_numbers(mine.outline)
    theirs = _room(int(lengths[before]))
    wire = agreement.wire_of(theirs.device, to_one=True)
    for start in range(0, int(lengths.max()), _CHUNK):
        outgoing = mine.data[start : start + _CHUNK].to(wire)
        incoming = theirs[start : start + _CHUNK].to(wire)
        operations = [dist.P2POp(dist.isend, outgoing, after)] if outgoing.numel() else []
        operations += [dist.P2POp(dist.irecv, incoming, before)] if incoming.numel() else []
        for work in dist.batch_isend_irecv(operations):
            work.wait()
        theirs[start : start + _CHUNK].copy_(incoming)
    return _Part(mine.steps, int(outlines[before]), theirs)


def _give(data: torch.Tensor, source: int, taker: int) -> None:
    """Send bytes from one rank to another; called on these."""
    wire = agreement.wire_of(data.device, to_one=True)
    for start in range(0, data.numel(), _CHUNK):
        part = data[start : start + _CHUNK].to(wire)
        if rank() == source:
            dist.send(part, dst=taker)
        else:
            dist.recv(part, src=source)
            data[start : start + _CHUNK].copy_(part)
