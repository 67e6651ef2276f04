"""What `check` and `sync` are given, taken apart: names, hashes, and how bytes of another rank are put in their place.

Knows models, DTensors, optimizers and other keepers of state; does not decide who gives what to whom.
"""

from __future__ import annotations

import hashlib
import pickle
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from nbdist.errors import UsageError
from nbdist.train import active_training
from nbdist.train import state as training
from nbdist.train.collective.agreement import tell, wire_of
from nbdist.train.collective.participants import refuse_partial
from nbdist.train.compare.prepared import prepared_objects
from nbdist.train.loop.averages import averages_of
from nbdist.train.sharding.shards import gather_again
from nbdist.train.sharding.zero import refuse_overruled, refuse_partitioned

_CHUNK = 64 << 20  # bytes that are hashed or sent at once
_BASIC = (bool, int, float, complex, str, bytes, type(None))


@dataclass(frozen=True)
class Entry:
    """What a rank tells the others of one tensor or value.

    Attributes:
        kind: "parameter", "average" (of a parameter), "buffer" or "value of state".
        digest: Hash of its bytes.
        form: Type and shape of a tensor; tensors of the same form can be copied into each other. "value" for others.
        device: Type of the tensor's device.
        shard: Which part of a sharded tensor it is, None if it is not a DTensor.
        mates: Of a shard: the ranks whose shards make up the whole.
    """

    kind: str
    digest: bytes
    form: str
    device: str = "cpu"
    shard: tuple[int, ...] | None = None
    mates: tuple[int, ...] = ()


@dataclass(frozen=True)
class Described:
    """What a rank tells the others of its arguments.

    Attributes:
        entries: What there is, by name.
        labels: The arguments.
        src: Whose state is to be taken; None: that is to be chosen.
        steps: The most that an optimizer has done, if it counts.
        newcomer: Whether this rank has replaced one that died, and holds nothing of the training yet.
        failure: Why it can't take part.
    """

    entries: Mapping[str, Entry] = field(default_factory=dict)
    labels: tuple[str, ...] = ()
    src: int | None = None
    steps: int | None = None
    newcomer: bool = False
    failure: str = ""


@dataclass(frozen=True)
class Team:
    """The ranks that take part."""

    group: dist.ProcessGroup | None
    ranks: tuple[int, ...]

    @classmethod
    def of(cls, group: dist.ProcessGroup | None, function: str) -> Team:
        """Return the ranks of a group, None for all."""
        if not (dist.is_available() and dist.is_initialized()):
            raise UsageError(
                f"{function} is for ranks, and this process has no process group: put it into a %%distributed cell, "
                "or call torch.distributed.init_process_group() first"
            )
        if group is not None and dist.get_rank(group) < 0:
            raise UsageError(f"this rank is not in the group: call {function} on the ranks that are")
        team = cls(group, tuple(dist.get_process_group_ranks(group)))
        refuse_partial(function, len(team.ranks))
        return team

    def give(self, tensors: Sequence[torch.Tensor], device: str, source: int, taker: int | None) -> None:
        """Write the tensors of rank `source` into those of the taker, or of all ranks; called on these."""
        wire = wire_of(_device(device), self.group, to_one=taker is not None)
        for batch in _batches(tensors):
            parcel = torch.cat([_as_bytes(tensor).to(wire) for tensor in batch])
            if taker is None:
                dist.broadcast(parcel, src=source, group=self.group)
            elif dist.get_rank() == source:
                dist.send(parcel, dst=taker, group=self.group)
            else:
                dist.recv(parcel, src=source, group=self.group)
            if dist.get_rank() != source:
                _unpack(parcel, batch)


def _device(kind: str) -> torch.device:
    return torch.device(kind) if kind == "cpu" else torch.device(kind, torch.accelerator.current_device_index())


def _batches(tensors: Iterable[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    batch: list[torch.Tensor] = []
    size = 0
    for tensor in tensors:
        if batch and size + tensor.nbytes > _CHUNK:
            yield batch
            batch, size = [], 0
        batch.append(tensor)
        size += tensor.nbytes
    if batch:
        yield batch


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)


@torch.no_grad()
def _unpack(parcel: torch.Tensor, tensors: Iterable[torch.Tensor]) -> None:
    offset = 0
    for tensor in tensors:
        fresh = torch.empty(tensor.shape, dtype=tensor.dtype, device=parcel.device)  # aligned, unlike the parcel
        fresh.reshape(-1).view(torch.uint8).copy_(parcel[offset : offset + tensor.nbytes])
        tensor.copy_(fresh)
        offset += tensor.nbytes


def describe(function: str, objects: Sequence[Any], src: int | None) -> tuple[list[Argument], Described]:
    """Take arguments apart. An error becomes part of the description, so that all ranks hear of it."""
    try:
        parts = _parts(function, objects or prepared_objects(function))
        entries = {name: entry for part in parts for name, entry in part.entries().items()}
    except UsageError as error:
        return [], Described(failure=str(error))
    except Exception as error:  # of state_dict() of an object of the user's
        return [], Described(failure=f"{type(error).__name__}: {error}")
    steps = max((part.steps for part in parts if part.steps is not None), default=None)
    labels = tuple(part.label for part in parts)
    return parts, Described(entries, labels, src, steps, active_training.newcomer)


class Argument:
    """One argument.

    Args:
        label: How it is called among the arguments.
    """

    steps: int | None = None

    def __init__(self, label: str) -> None:
        self.label = label

    def entries(self) -> dict[str, Entry]:
        """Return what there is, by name."""
        raise NotImplementedError

    def receive(
        self, plan: Mapping[str, Mapping[int, int]], described: Mapping[int, Described], src: int, team: Team
    ) -> None:
        """Take from other ranks what this one needs, and give. `plan`: of each name, who needs it from whom."""
        raise NotImplementedError


class _Tensors(Argument):
    """A model, or tensors. `tensors`: kind and tensor, by name."""

    def __init__(self, label: str, tensors: Mapping[str, tuple[str, torch.Tensor]]) -> None:
        super().__init__(label)
        self._tensors = tensors

    def entries(self) -> dict[str, Entry]:
        return {name: _entry(kind, tensor) for name, (kind, tensor) in self._tensors.items()}

    def receive(
        self, plan: Mapping[str, Mapping[int, int]], described: Mapping[int, Described], src: int, team: Team
    ) -> None:
        tensors = {name: tensor for name, (_, tensor) in self._tensors.items() if name in plan}
        _receive_tensors(tensors, plan, described[src].entries, src, team)


class _State(Argument):
    """Something with a state_dict(). `names`: what to call the parameters that it numbers."""

    def __init__(self, label: str, owner: Any, names: Mapping[str, str]) -> None:
        super().__init__(label)
        self._owner = owner
        self._names = names
        self._state = owner.state_dict()
        self._leaves = {self._name(path): leaf for path, leaf in _leaves(self._state)}
        if isinstance(owner, torch.optim.Optimizer):
            counts = [int(leaf) for path, leaf in _leaves(self._state) if path[0] == "state" and path[-1] == "step"]
            self.steps = max(counts, default=None)

    def entries(self) -> dict[str, Entry]:
        return {name: _entry("value of state", leaf) for name, leaf in self._leaves.items()}

    def receive(
        self, plan: Mapping[str, Mapping[int, int]], described: Mapping[int, Described], src: int, team: Team
    ) -> None:
        told = [ranks.entries for ranks in described.values()]
        mine = {name for entries in told for name in entries if name in plan and name.startswith(f"{self.label}.")}
        if all(name in entries and _same_tensor(name, told) for name in mine for entries in told):
            tensors = {name: leaf for name, leaf in self._leaves.items() if name in mine}
            _receive_tensors(tensors, plan, described[src].entries, src, team)
        elif mine:
            self._receive_structure(mine, plan, described, src, team)

    def _receive_structure(
        self,
        mine: set[str],
        plan: Mapping[str, Mapping[int, int]],
        described: Mapping[int, Described],
        src: int,
        team: Team,
    ) -> None:
        """Take the values and the outline from `src`, the tensors that differ from whoever has them, and load it."""
        outline = tell(_rebuilt(self._state, _Slot.of), src, team.group)
        state = _rebuilt(outline, self._filled)
        tensors = {self._name(path): leaf for path, leaf in _leaves(state) if isinstance(leaf, torch.Tensor)}
        wanted = {name: tensor for name, tensor in tensors.items() if name in mine}
        _receive_tensors(wanted, plan, described[src].entries, src, team)
        if any(dist.get_rank() in plan[name] for name in mine):
            self._owner.load_state_dict(state)

    def _filled(self, path: tuple[str, ...], leaf: Any) -> Any:
        """Return this rank's own tensor where it has a fitting one, else a new one."""
        if not isinstance(leaf, _Slot):
            return leaf
        known = self._leaves.get(self._name(path))
        if isinstance(known, torch.Tensor) and (leaf.sharded or _form(known) == leaf.form):
            return known
        if leaf.sharded and (parameter := self._parameter(path)) is not None:
            return torch.zeros_like(parameter.detach(), dtype=leaf.dtype)  # sharded alike
        device = torch.device("cpu") if leaf.device == "cpu" else torch.accelerator.current_accelerator()
        return torch.empty(leaf.shape, dtype=leaf.dtype, device=device)

    def _parameter(self, path: tuple[str, ...]) -> torch.Tensor | None:
        """Return the parameter that a value of an optimizer's state belongs to."""
        if not isinstance(self._owner, torch.optim.Optimizer) or path[0] != "state":
            return None
        parameters = [parameter for group in self._owner.param_groups for parameter in group["params"]]
        return parameters[int(path[1])] if path[1].isdigit() else None

    def _name(self, path: tuple[str, ...]) -> str:
        if path[0] == "state" and len(path) > 1:
            path = ("state", self._names.get(path[1], path[1]), *path[2:])
        return ".".join((self.label, *path))


@dataclass(frozen=True)
class _Slot:
    """Stands for a tensor in the outline of a state."""

    form: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: str
    sharded: bool

    @classmethod
    def of(cls, path: tuple[str, ...], leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        return cls(_form(leaf), tuple(leaf.shape), leaf.dtype, leaf.device.type, _is_dtensor(leaf))


def _receive_tensors(
    tensors: Mapping[str, torch.Tensor],
    plan: Mapping[str, Mapping[int, int]],
    original: Mapping[str, Entry],
    src: int,
    team: Team,
) -> None:
    """Receive whole tensors, sent to all ranks at once, and shards, sent from rank to rank in turn."""
    whole = [name for name in sorted(tensors) if original[name].shard is None]
    for device in sorted({original[name].device for name in whole}):
        team.give([tensors[name] for name in whole if original[name].device == device], device, src, None)
    shards = [name for name in sorted(tensors) if original[name].shard is not None]
    for taker, source in sorted({pair for name in shards for pair in plan[name].items()}):
        if dist.get_rank() in (taker, source):
            names = [name for name in shards if plan[name].get(taker) == source]
            team.give([_local(tensors[name]) for name in names], original[names[0]].device, source, taker)


def _same_tensor(name: str, told: Iterable[Mapping[str, Entry]]) -> bool:
    forms = {entries[name].form for entries in told if name in entries}
    return len(forms) == 1 and forms != {"value"}


def _parts(function: str, objects: Sequence[Any]) -> list[Argument]:
    for thing in objects:
        _refuse_unknown_shards(function, thing)
    modules = [thing for thing in objects if isinstance(thing, torch.nn.Module)]
    parameters = {id(p): name for module in modules for name, p in module.named_parameters()}
    labels = _labels(objects)
    return [
        _part(function, thing, label, parameters, alone=len(modules) == 1)
        for thing, label in zip(objects, labels, strict=True)
    ]


def _part(function: str, thing: Any, label: str, parameters: Mapping[int, str], alone: bool) -> Argument:
    refuse = refuse_overruled if function == "sync" else refuse_partitioned
    if isinstance(thing, torch.nn.Module):
        refuse(function, thing.parameters())
        return _Tensors(label, _of_module(thing, "" if alone else f"{label}."))
    if isinstance(thing, torch.Tensor):
        refuse(function, [thing])
        return _Tensors(label, {label: ("parameter", thing)})
    if callable(getattr(thing, "state_dict", None)) and callable(getattr(thing, "load_state_dict", None)):
        return _State(label, thing, _numbered(thing, parameters))
    tensors = dict(thing) if isinstance(thing, Mapping) else dict(enumerate(thing)) if _iterable(thing) else {}
    if tensors and all(isinstance(tensor, torch.Tensor) for tensor in tensors.values()):
        refuse(function, tensors.values())
        return _Tensors(label, {f"{label}.{key}": ("parameter", tensor) for key, tensor in tensors.items()})
    raise UsageError(
        f"{function} can't handle {type(thing).__name__!r} objects: give it models, tensors, "
        "or objects with state_dict() and load_state_dict(), such as optimizers and schedulers"
    )


def _iterable(thing: Any) -> bool:
    return isinstance(thing, Iterable) and not isinstance(thing, str | bytes)


def _labels(objects: Iterable[Any]) -> list[str]:
    """Return the names of the arguments' classes, numbered where they repeat. A wrapper is called as what it wraps."""
    labels: list[str] = []
    for thing in objects:
        inner = getattr(thing, "module", thing) if isinstance(thing, torch.nn.Module) else thing
        name = type(inner if isinstance(inner, torch.nn.Module) else thing).__name__
        taken = sum(label.split(" ")[0] == name for label in labels)
        labels.append(f"{name} {taken + 1}" if taken else name)
    return labels


def _of_module(module: torch.nn.Module, prefix: str) -> dict[str, tuple[str, torch.Tensor]]:
    gather_again(module)
    parameters: dict[str, tuple[str, torch.Tensor]] = {
        f"{prefix}{name}": ("parameter", tensor) for name, tensor in module.named_parameters()
    }
    if training.is_begun():
        for name, average in averages_of(module.named_parameters(), training.current()):
            parameters[f"{prefix}{name} (averaged)"] = ("average", average)
    return parameters | {f"{prefix}{name}": ("buffer", tensor) for name, tensor in module.named_buffers()}


def _numbered(thing: Any, parameters: Mapping[int, str]) -> dict[str, str]:
    """Return what an optimizer's numbers of parameters stand for, as far as their models were given."""
    if not isinstance(thing, torch.optim.Optimizer):
        return {}
    members = dict.fromkeys(id(parameter) for group in thing.param_groups for parameter in group["params"])
    return {str(number): parameters[key] for number, key in enumerate(members) if key in parameters}


_SHARDED_OTHERWISE = {
    "FullyShardedDataParallel": "use torch.distributed.fsdp.fully_shard instead, or load a checkpoint",
    "DeepSpeedEngine": "compare engine.module, or load a checkpoint: engine.load_checkpoint(...)",
    "DeepSpeedZeroOptimizer": "load a checkpoint: engine.load_checkpoint(...)",
    "DeepSpeedZeroOptimizer_Stage3": "load a checkpoint: engine.load_checkpoint(...)",
    "ZeroRedundancyOptimizer": "load a checkpoint",
}


def _refuse_unknown_shards(function: str, thing: Any) -> None:
    """Raise an error for objects that keep different parts on each rank in tensors that look whole."""
    for part in thing.modules() if isinstance(thing, torch.nn.Module) else [thing]:
        for kind in type(part).__mro__:
            if kind.__name__ in _SHARDED_OTHERWISE:
                advice = _SHARDED_OTHERWISE[kind.__name__]
                raise UsageError(f"{function} can't tell which parts of a {kind.__name__} a rank holds: {advice}")


def _entry(kind: str, leaf: Any) -> Entry:
    if not isinstance(leaf, torch.Tensor):
        return Entry(kind, hashlib.blake2b(_canonical(leaf), digest_size=16).digest(), "value")
    if not _is_dtensor(leaf):
        return Entry(kind, _digest(leaf), _form(leaf), leaf.device.type)
    shard, mates = _place(leaf)
    return Entry(kind, _digest(_local(leaf)), _form(leaf), leaf.device.type, shard, mates)


def _form(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def _digest(tensor: torch.Tensor) -> bytes:
    found = hashlib.blake2b(_form(tensor).encode(), digest_size=16)
    if not tensor.is_meta and tensor.numel():
        for piece in _as_bytes(tensor).split(_CHUNK):
            found.update(piece.cpu().numpy())
    return found.digest()


def _is_dtensor(tensor: torch.Tensor) -> bool:
    kind = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)
    return kind is not None and isinstance(tensor, kind)


def _local(tensor: Any) -> torch.Tensor:
    local: torch.Tensor = tensor.detach().to_local()
    return local


def _place(tensor: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return which shard of a DTensor this rank holds, and the ranks that hold the other shards of the same replica."""
    ranks = tensor.device_mesh.mesh
    position = tensor.device_mesh.get_coordinate()
    axes = [axis for axis, placement in enumerate(tensor.placements) if not placement.is_replicate()]
    mates = ranks[tuple(slice(None) if axis in axes else place for axis, place in enumerate(position))]
    return tuple(position[axis] for axis in axes), tuple(mates.flatten().tolist())


def _leaves(value: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield the tensors and values in nested dicts, lists and tuples; a list of plain values counts as one."""
    children = _children(value)
    if children is None:
        if not (isinstance(value, Mapping) and not value):
            yield path, value
        return
    for key, child in children:
        yield from _leaves(child, (*path, str(key)))


def _rebuilt(value: Any, change: Callable[[tuple[str, ...], Any], Any], path: tuple[str, ...] = ()) -> Any:
    """Return a copy of nested dicts, lists and tuples with changed leaves."""
    children = _children(value)
    if children is None:
        return change(path, value)
    changed = {key: _rebuilt(child, change, (*path, str(key))) for key, child in children}
    return changed if isinstance(value, Mapping) else type(value)(changed.values())


def _children(value: Any) -> list[tuple[Any, Any]] | None:
    if isinstance(value, Mapping) and value:
        return list(value.items())
    if type(value) in (list, tuple) and not all(isinstance(child, _BASIC) for child in value):
        return list(enumerate(value))
    return None


def _canonical(value: Any) -> bytes:
    """Return the bytes that are equal for equal values; pickles of equal texts may differ."""
    plain = isinstance(value, _BASIC) or (type(value) in (list, tuple) and all(isinstance(v, _BASIC) for v in value))
    return repr(value).encode() if plain else pickle.dumps(value)
