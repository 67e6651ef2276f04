"""A state taken apart for a checkpoint, and put together again. Independent of files, and of ranks only its own.

Tensors of models and optimizers get names that hold for any strategy and number of ranks. All else, such as random
generators and the position in the data, is a tree of plain values that belongs to this rank.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from nbdist.errors import UsageError
from nbdist.train.collective.rng import restore_random, take_random
from nbdist.train.loop.averages import averages_of, empty_average
from nbdist.train.loop.gradients import parameters_of
from nbdist.train.pipeline.stages import stages_of
from nbdist.train.sharding.ddp_reducer import Layout, lay_out, layout_of
from nbdist.train.sharding.shards import gather_again
from nbdist.train.sharding.zero_engine import DeepSpeedModel, engines_among, whole_sizes
from nbdist.train.state import COUNTERS, State
from nbdist.train.structure.quantized import is_quantized, is_signed, quantized, refuse_unquantizable, values_of
from nbdist.train.structure.shadow import Shadow

_WRAPPERS = (
    "_orig_mod",
    "_checkpoint_wrapped_module",
)  # what torch.compile and activation checkpointing put into names
_AVERAGES = "averages"  # what the names of averaged weights begin with, before those of the weights
_SHOWN = 5


@dataclass
class Snapshot:
    """What a checkpoint keeps of this rank.

    Attributes:
        tensors: Of models and optimizers, by name; shards are DTensors.
        values: All else.
        buffers: Names of the buffers among the tensors, with a hash of this rank's: ranks may hold different ones.
        models: The prefix of each model's names, with a description of the model that is the same on all ranks.
    """

    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)
    buffers: dict[str, str] = field(default_factory=dict)
    models: dict[str, str] = field(default_factory=dict)


def take(state: State) -> Snapshot:
    """Return what there is now. Tensors are the living ones, not copies.

    Raises:
        UsageError: Something can't be kept; the text names it.
    """
    snapshot = Snapshot()
    models = [_Model(prefix, module) for prefix, module in _modules(state)]
    for model in models:
        snapshot.tensors |= model.tensors()
        snapshot.buffers |= {name: _digest(model.tensors()[name]) for name in model.buffers()}
        snapshot.models[model.prefix] = hashlib.blake2b(repr(model.shapes()).encode(), digest_size=8).hexdigest()
    names = {key: name for model in models for key, name in model.parameters.items()}
    snapshot.tensors |= _averages(models, state)
    optimizers = []
    for number, optimizer in enumerate(_own_optimizers(state)):
        tensors, values = _take_optimizer(f"optimizers.{number}", optimizer, names)
        snapshot.tensors |= tensors
        optimizers.append(values)
    snapshot.values = {
        "extra": {model.prefix: model.extra() for model in models},
        "optimizers": optimizers,
        "random": take_random(state.device),
        "counters": {name: getattr(state, name) for name in COUNTERS},
        "engines": described_engines(state),
        "buckets": {model.prefix: model.buckets() for model in models},
        **{kind: [_state_of(thing) for thing in things] for kind, things in _keepers(state).items()},
    }
    return snapshot


def described_engines(state: State) -> list[dict[str, Any]]:
    """Return what engines of DeepSpeed must have in common with those whose checkpoint is loaded into them."""
    return [
        {"stage": state.plan.stage, "parameters": [list(size) for size in whole_sizes(model)]}
        for model in engines_among(state.models)
    ]


def joined(stages: Sequence[Sequence[Mapping[str, Any]]]) -> list[dict[str, Any]]:
    """Return what is kept of optimizers, of what each stage of a pipeline keeps of them."""
    found = []
    for parts in zip(*stages, strict=True):
        groups = [
            {**same[0], "params": list(dict.fromkeys(name for group in same for name in group["params"]))}
            for same in zip(*(part["groups"] for part in parts), strict=True)
        ]
        by_name = ("tensors", "quantized", "values")
        found.append(
            {"groups": groups, **{kind: {k: v for part in parts for k, v in part[kind].items()} for kind in by_name}}
        )
    return found


class Restoring:
    """A state that a checkpoint is put into.

    Args:
        state: What is restored.
        values: What `take` has given on the rank whose values this one gets.
        shapes: Of the tensors in the checkpoint, by name.

    Attributes:
        notes: On models that are only here or only in the checkpoint, as a replaced one that is still held.

    Raises:
        UsageError: The checkpoint is of other models, optimizers or whatever else; nothing has changed.
    """

    def __init__(self, state: State, values: Mapping[str, Any], shapes: Mapping[str, torch.Size]) -> None:
        self._state = state
        self._values = values
        self._refuse_other_counts()
        self._models, self.notes = _models_of(state, values, shapes)
        self._optimizers = _optimizers_of(state, values, self._models)
        for model in self._models:
            model.refuse_other(_of_prefix(shapes, model.prefix))
        for optimizer in self._optimizers:
            optimizer.refuse_other()

    def slots(self, types: Mapping[str, tuple[torch.Size, torch.dtype]]) -> dict[str, torch.Tensor]:
        """Return the tensors to read into, by name: those of models and optimizers themselves where they fit."""
        slots = {name: tensor for model in self._models for name, tensor in model.tensors().items()}
        for optimizer in self._optimizers:
            slots |= optimizer.slots(types)
        return slots | {name: slot for name, (_, slot) in self._averages(types).items()}

    def _averages(self, names: Container[str]) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
        """Return the parameters whose averages are in the checkpoint, and what these are read into."""
        if self._state.plan.ema is None:
            return {}
        return {
            name: (parameter, self._state.averages.get(parameter, empty_average(parameter)))
            for model in self._models
            for own, parameter in model.trained()
            if (name := f"{_AVERAGES}.{own}") in names
        }

    def finish(self, slots: Mapping[str, torch.Tensor], seed: str | None, shared: Sequence[str]) -> None:
        """Put everything in its place.

        Args:
            slots: What `slots` has given, filled.
            seed: None: the values are of this very rank among as many ranks. Else its buffers and generators don't fit,
                and this is what new seeds are made of.
            shared: Random generators that were in the same state on all ranks.
        """
        buffers = self._values.get("buffers", {}) if seed is None else {}
        for model in self._models:
            model.restore(self._values["extra"].get(model.prefix, {}), buffers)
            if seed is None:
                model.sum_as(self._values.get("buckets", {}).get(model.prefix))
        for optimizer in self._optimizers:
            optimizer.restore(slots)
        for kind, things in _keepers(self._state).items():
            for thing, value in zip(things, self._values[kind], strict=True):
                if value is not None and hasattr(thing, "load_state_dict"):
                    thing.load_state_dict(value)
        for name in COUNTERS:
            setattr(self._state, name, self._values["counters"][name])
        self._state.averages.clear()
        for name, (parameter, _) in self._averages(slots).items():
            self._state.averages[parameter] = slots[name]
        self._state.abandon_window()
        restore_random(self._values["random"], self._state.device, seed, shared)  # last: the others may draw

    def _refuse_other_counts(self) -> None:
        is_empty = not any(_modules(self._state)) and not engines_among(self._state.models)
        if is_empty and self._values["extra"]:
            raise UsageError(
                "nothing is prepared, so there is nothing to load into: call nbdist.prepare(model, ...) first, as when "
                "it was saved. Nothing was loaded"
            )
        for kind, things in _keepers(self._state).items():
            if len(things) != len(self._values[kind]):
                raise UsageError(_other_count(kind, len(things), len(self._values[kind])))
        _refuse_other_engines(described_engines(self._state), self._values.get("engines", []))


def _refuse_other_engines(here: Sequence[Mapping[str, Any]], there: Sequence[Mapping[str, Any]]) -> None:
    if len(here) != len(there):
        raise UsageError(_other_count("models under DeepSpeed", len(here), len(there)))
    for mine, saved in zip(here, there, strict=True):
        if mine["stage"] != saved["stage"]:
            raise UsageError(
                f"the checkpoint is of DeepSpeed's stage {saved['stage']}, which no other stage can load, and the plan "
                f"has stage {mine['stage']}: set stage to {saved['stage']} and prepare again. Nothing was loaded"
            )
        if mine["parameters"] != saved["parameters"]:
            raise UsageError(
                "the checkpoint is for another model under DeepSpeed, with parameters of other sizes: prepare the "
                "model that was saved. Nothing was loaded"
            )


class _Model:
    """A module under the names that its tensors have in checkpoints."""

    def __init__(self, prefix: str, module: nn.Module) -> None:
        self.prefix = prefix
        self.module = module
        self._stages = stages_of(module)
        gather_again(module)
        self.parameters: dict[int, str] = {}
        tied: set[str] = set()
        for name, parameter in module.named_parameters(remove_duplicate=False):
            own = f"{prefix}.{plain_name(module, name)}"
            if self.parameters.setdefault(id(parameter), own) != own:
                tied.add(own)
            if parameter.is_meta:
                raise UsageError(f"{own} is on the meta device, without values: prepare the model first")
        self._state = {f"{prefix}.{name}": value for name, value in get_model_state_dict(module).items()}
        self._tensors = {
            name: value for name, value in self._state.items() if isinstance(value, torch.Tensor) and name not in tied
        }

    def tensors(self) -> dict[str, torch.Tensor]:
        return self._tensors

    def trained(self) -> list[tuple[str, torch.Tensor]]:
        """Return its parameters under their names, each once."""
        own = {id(parameter): parameter for parameter in self.module.parameters()}
        return [(name, own[key]) for key, name in self.parameters.items() if key in own]

    def shapes(self) -> dict[str, torch.Size]:
        """Return the shapes of its tensors, by their names in the module; of all stages, if it was cut into some."""
        if self._stages is not None:
            return {name: form.shape for name, form in self._stages.forms.items()}
        return {name.removeprefix(f"{self.prefix}."): tensor.shape for name, tensor in self._tensors.items()}

    def elsewhere(self) -> set[str]:
        """Return the names of tensors that only other stages have."""
        return {f"{self.prefix}.{name}" for name in self.shapes()} - self._tensors.keys()

    def buffers(self) -> list[str]:
        """Return the names of whole tensors that are not parameters, whose values may differ between ranks."""
        known = set(self.parameters.values())
        return [name for name, tensor in self._tensors.items() if name not in known and not isinstance(tensor, DTensor)]

    def extra(self) -> dict[str, Any]:
        """Return what modules keep besides tensors (`get_extra_state`)."""
        return {name: value for name, value in self._state.items() if not isinstance(value, torch.Tensor)}

    def buckets(self) -> Layout | None:
        """Return the order in which DDP sums gradients; None: there is no DDP, or it has not settled yet."""
        return layout_of(self.module) if isinstance(self.module, DistributedDataParallel) else None

    def sum_as(self, buckets: Layout | None) -> None:
        """Have DDP sum gradients in the order in which it did, of which more than two ranks' sums depend."""
        if buckets is not None and isinstance(self.module, DistributedDataParallel):
            lay_out(self.module, buckets)

    def refuse_other(self, shapes: Mapping[str, torch.Size]) -> None:
        mine = self.shapes()
        shown = "" if self.prefix == "models.0" else f"{self.prefix}."
        differences = [f"{shown}{name} is missing in the checkpoint" for name in mine if name not in shapes]
        differences += [f"{shown}{name} is only in the checkpoint" for name in shapes if name not in mine]
        differences += [
            f"{shown}{name} is {list(shapes[name])} there and {list(shape)} here"
            for name, shape in mine.items()
            if name in shapes and shapes[name] != shape
        ]
        if differences:
            told = listed(differences)
            raise UsageError(f"the checkpoint is for another model: {told}. Nothing was loaded")

    def restore(self, extra: Mapping[str, Any], buffers: Mapping[str, torch.Tensor]) -> None:
        for name, value in buffers.items():
            if name in self._tensors:
                self._tensors[name].copy_(value)
        # The tensors are the module's own, so this copies nothing; modules that keep more hear of it.
        full = {name.removeprefix(f"{self.prefix}."): extra.get(name, value) for name, value in self._state.items()}
        set_model_state_dict(self.module, full)
        for parameter in self.module.parameters():
            parameter.grad = None  # of a step that belongs to what was there before


def _averages(models: Iterable[_Model], state: State) -> dict[str, torch.Tensor]:
    return {f"{_AVERAGES}.{name}": average for model in models for name, average in averages_of(model.trained(), state)}


class _OptimizerSlots:
    """An optimizer that is restored from what a checkpoint holds of it."""

    def __init__(
        self,
        prefix: str,
        values: Mapping[str, Any],
        optimizer: torch.optim.Optimizer,
        names: Mapping[int, str],
        elsewhere: Container[str],
    ) -> None:
        self._prefix = prefix
        self._elsewhere = elsewhere
        self._optimizer = optimizer
        self._values = values
        self._signs: Mapping[str, Mapping[str, bool]] = values.get("quantized", {})
        self._groups = _named_groups(prefix, optimizer, names)
        self._parameters = {
            name: parameter
            for group, named in zip(optimizer.param_groups, self._groups, strict=True)
            for parameter, name in zip(group["params"], named, strict=True)
        }

    def refuse_other(self) -> None:
        if self._signs:
            refuse_unquantizable(self._optimizer)
        theirs = [group["params"] for group in self._values["groups"]]
        if len(theirs) != len(self._groups):
            raise UsageError(
                f"{self._prefix} has {_count(len(theirs), 'groups')} of parameters in the checkpoint and "
                f"{len(self._groups)} here: make it with the same groups. Nothing was loaded"
            )
        for number, (saved, mine) in enumerate(zip(theirs, self._groups, strict=True)):
            differences = [f"{name} is missing in the checkpoint" for name in mine if name not in saved]
            differences += [
                f"{name} is only in the checkpoint"
                for name in saved
                if name not in mine and name not in self._elsewhere
            ]
            if differences:
                told = f"{self._prefix} trains other parameters in group {number}: {listed(differences)}"
                raise UsageError(f"{told}. Nothing was loaded")

    def slots(self, types: Mapping[str, tuple[torch.Size, torch.dtype]]) -> dict[str, torch.Tensor]:
        found = {}
        for name, keys in self._own("tensors"):
            parameter = self._parameters[name]
            present = self._optimizer.state.get(parameter, {})
            for key in keys:
                full = f"{self._prefix}.{name}.{key}"
                found[full] = _slot(present.get(key), parameter, *types[full])
        return found

    def restore(self, slots: Mapping[str, torch.Tensor]) -> None:
        numbers = {name: number for number, name in enumerate(self._parameters)}
        state: dict[int, dict[str, Any]] = {}
        for name, keys in self._own("tensors"):
            state[numbers[name]] = {key: slots[f"{self._prefix}.{name}.{key}"] for key in keys}
        for name, plain in self._own("values"):
            state.setdefault(numbers[name], {}).update(plain)
        # Parameters may stand in another order than they were saved in, so each group is in the order of this one.
        groups = [
            {**group, "params": [numbers[name] for name in named]}
            for group, named in zip(self._values["groups"], self._groups, strict=True)
        ]
        self._optimizer.load_state_dict({"state": state, "param_groups": groups})
        for name, signs in self._own("quantized"):
            parameter = self._parameters[name]
            known = self._optimizer.state[parameter]
            known |= {key: quantized(self._optimizer, parameter, known[key], signs[key]) for key in signs}

    def _own(self, kind: str) -> list[tuple[str, Any]]:
        """Return what the checkpoint holds of the parameters that this rank's stage has."""
        return [(name, kept) for name, kept in self._values.get(kind, {}).items() if name not in self._elsewhere]


def _models_of(
    state: State, values: Mapping[str, Any], shapes: Mapping[str, torch.Size]
) -> tuple[list[_Model], list[str]]:
    """Return the models that are restored, by the names of the checkpoint; and what is only here or only there.

    Raises:
        UsageError: There are other numbers of them, and those that are too many are not only additional.
    """
    modules = dict(_modules(state))
    here = [prefix for prefix in modules if prefix.startswith("models.")]
    there = [prefix for prefix in values["extra"] if prefix.startswith("models.")]

    def fits(mine: str, kept: str) -> bool:
        return _Model(mine, modules[mine]).shapes() == _of_prefix(shapes, kept)

    pairs, notes = _paired(here, there, fits)
    registered = [prefix for prefix in modules if prefix not in here]
    models = [_Model(kept, modules[mine]) for mine, kept in pairs]
    return models + [_Model(prefix, modules[prefix]) for prefix in registered], notes


def _paired(
    here: Sequence[str], there: Sequence[str], fits: Callable[[str, str], bool]
) -> tuple[list[tuple[str, str]], list[str]]:
    """Return models here with those in the checkpoint: in order if they are as many, else the newest that fit.

    Raises:
        UsageError: They are not as many, and not all of the fewer fit.
    """
    if len(here) == len(there):
        return list(zip(here, there, strict=True)), []
    pairs: list[tuple[str, str]] = []
    left = list(there)
    for mine in reversed(here):
        kept = next((kept for kept in reversed(left) if fits(mine, kept)), None)
        if kept is not None:
            left.remove(kept)
            pairs.insert(0, (mine, kept))
    if not pairs or len(pairs) < min(len(here), len(there)):
        raise UsageError(_other_count("models", len(here), len(there)))
    rest = "the others in the checkpoint were left out" if left else "the others here stay as they are"
    return pairs, [
        f"it holds {_count(len(there), 'models')}, {len(here)} prepared here: the newest were loaded, {rest}"
    ]


def _optimizers_of(state: State, values: Mapping[str, Any], models: Sequence[_Model]) -> list[_OptimizerSlots]:
    """Return the optimizers of the models that are restored.

    Raises:
        UsageError: There are other numbers of them.
    """
    names = {key: name for model in models for key, name in model.parameters.items()}
    prefixes = tuple(f"{model.prefix}." for model in models)
    elsewhere = set().union(*(model.elsewhere() for model in models))
    here = [
        optimizer
        for optimizer in _own_optimizers(state)
        if any(id(each) in names for each in parameters_of(optimizer)) or (elsewhere and not parameters_of(optimizer))
    ]
    there = [
        (f"optimizers.{number}", kept)
        for number, kept in enumerate(values["optimizers"])
        if any(name.startswith(prefixes) for group in kept["groups"] for name in group["params"])
    ]
    if len(here) != len(there):
        raise UsageError(_other_count("optimizers", len(here), len(there)))
    return [_OptimizerSlots(*kept, optimizer, names, elsewhere) for optimizer, kept in zip(here, there, strict=True)]


def _other_count(kind: str, here: int, there: int) -> str:
    prepared = f"{here} {'is' if here == 1 else 'are'} prepared here"
    return (
        f"the checkpoint holds {_count(there, kind)}, and {prepared}: prepare (or register) the same number. "
        "Nothing was loaded"
    )


def _of_prefix(shapes: Mapping[str, torch.Size], prefix: str) -> dict[str, torch.Size]:
    """Return the shapes of one model's tensors, by the names that they have in the module."""
    return {name.removeprefix(f"{prefix}."): shape for name, shape in shapes.items() if name.startswith(f"{prefix}.")}


def plain_name(module: nn.Module, name: str) -> str:
    """Return the name of a parameter without what wrappers put into it: the one that it has in the user's own model."""
    parts: list[str] = []
    for part in name.split("."):
        wrapped = part == "module" and isinstance(module, DistributedDataParallel)
        if not wrapped and part not in _WRAPPERS:
            parts.append(part)
        module = getattr(module, part)
    return ".".join(parts)


def listed(texts: Sequence[str]) -> str:
    """Return the first few of many, and how many more there are."""
    more = f"; and {len(texts) - _SHOWN:,} more" if len(texts) > _SHOWN else ""
    return "; ".join(texts[:_SHOWN]) + more


def _modules(state: State) -> Iterator[tuple[str, nn.Module]]:
    """Yield the models, and the modules among the registered objects, such as averaged weights, which may be large."""
    yield from (
        (f"models.{number}", model)
        for number, model in enumerate(state.models)
        if not isinstance(model, DeepSpeedModel)  # the engine saves it
    )
    for number, thing in enumerate(state.registered):
        if isinstance(thing, nn.Module):
            yield f"registered.{number}", thing


def _own_optimizers(state: State) -> list[torch.optim.Optimizer]:
    """Return the optimizers without those that an engine of DeepSpeed saves."""
    return [each for each in state.optimizers if getattr(state.records.get(each), "model", None) is None]


def _keepers(state: State) -> dict[str, list[Any]]:
    """Return what has a state_dict of values, by kind."""
    return {
        "schedulers": list(state.schedulers),
        "loaders": list(state.loaders),
        "registered objects": [thing for thing in state.registered if not isinstance(thing, nn.Module)],
        "scalers": [] if state.scaler is None else [state.scaler],
    }


def _state_of(thing: Any) -> Any:
    return _plain_state(thing.state_dict(), thing) if hasattr(thing, "state_dict") else None


def _plain_state(value: Any, owner: Any) -> Any:
    """Return a state without methods: a scheduler's holds its attributes, including those `prepare` replaced."""
    if isinstance(value, DTensor):
        raise UsageError(f"the state of {type(owner).__name__} holds shards: register the module that they belong to")
    if type(value) is dict:
        kept = {key: child for key, child in value.items() if not isinstance(child, Shadow)}
        return {key: _plain_state(child, owner) for key, child in kept.items()}
    return [_plain_state(child, owner) for child in value] if type(value) is list else value


def _take_optimizer(
    prefix: str, optimizer: torch.optim.Optimizer, names: Mapping[int, str]
) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Return its tensors, and the rest: groups with names instead of numbers, plain values, the names of the tensors,
    and those that are signed among the quantized ones.

    Not by torch's `get_optimizer_state_dict`: that makes a step with an optimizer that has made none yet.
    """
    groups = _named_groups(prefix, optimizer, names)
    order = [name for group in groups for name in group]
    kept = optimizer.state_dict()
    tensors: dict[str, torch.Tensor] = {}
    keys: dict[str, list[str]] = {}
    signs: dict[str, dict[str, bool]] = {}
    values: dict[str, dict[str, Any]] = {}
    for number, entries in kept["state"].items():
        name = order[number]
        keys[name], values[name] = [], {}
        for key, value in entries.items():
            if isinstance(value, torch.Tensor):
                keys[name].append(key)
                if is_quantized(value):
                    signs.setdefault(name, {})[key] = is_signed(value)
                tensors[f"{prefix}.{name}.{key}"] = values_of(value) if is_quantized(value) else value
            else:
                values[name][key] = value
    named = [{**group, "params": own} for group, own in zip(kept["param_groups"], groups, strict=True)]
    return tensors, {"groups": named, "tensors": keys, "quantized": signs, "values": values}


def _named_groups(prefix: str, optimizer: torch.optim.Optimizer, names: Mapping[int, str]) -> list[list[str]]:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if id(parameter) not in names:
                raise UsageError(
                    f"{prefix} ({type(optimizer).__name__}) trains a parameter of shape {list(parameter.shape)} that "
                    "belongs to no prepared model: prepare its model, too, or register it"
                )
    return [[names[id(parameter)] for parameter in group["params"]] for group in optimizer.param_groups]


def _slot(present: Any, parameter: torch.Tensor, size: torch.Size, dtype: torch.dtype) -> torch.Tensor:
    """Return the present tensor if it fits; else a new one, sharded as the parameter is if it has its shape."""
    fits = isinstance(present, torch.Tensor) and present.shape == size and present.dtype == dtype
    if fits and not is_quantized(present):
        return present.detach()  # type: ignore[no-any-return]
    if parameter.shape == size:
        return torch.empty_like(parameter, dtype=dtype, requires_grad=False)
    return torch.empty(size, dtype=dtype)


def _digest(tensor: torch.Tensor) -> str:
    whole = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return hashlib.blake2b(whole.numpy().tobytes(), digest_size=16).hexdigest()


def _count(number: int, things: str) -> str:
    return f"{number} {things}" if number != 1 else f"1 {things.removesuffix('s')}"
