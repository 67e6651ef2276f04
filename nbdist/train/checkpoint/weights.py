"""The weights that a model is given: whether they fit it, storage for what is on the meta device, and filling it.

Where they come from is in `nbdist.train.checkpoint.weight_sources`. Independent of plans or strategies.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.tensor import DTensor

from nbdist.errors import UsageError
from nbdist.train.checkpoint.state_snapshot import listed, plain_name
from nbdist.train.checkpoint.weight_sources import Shapes, Source
from nbdist.train.collective import agreement
from nbdist.train.pipeline.stages import stages_of
from nbdist.train.sharding.materialize import initializer
from nbdist.train.sharding.shards import gather_again

_OLD_BUFFERS = re.compile(r"(.*\.)?rotary_emb\.inv_freq")  # files of older versions of transformers hold them


@dataclass(frozen=True)
class ModelTensors:
    """What of a model goes into files.

    Attributes:
        tensors: Its own tensors by name, each once; shards are DTensors.
        tied: For each name that is another one's, that one.
        extra: Whether modules keep more than tensors.
    """

    tensors: dict[str, torch.Tensor]
    tied: dict[str, str]
    extra: bool

    @classmethod
    def of(cls, model: nn.Module) -> ModelTensors:
        """Return the tensors of a model, whatever it is wrapped in."""
        gather_again(model)
        first: dict[int, str] = {}
        tied: dict[str, str] = {}
        for name, tensor in [
            *model.named_parameters(remove_duplicate=False),
            *model.named_buffers(remove_duplicate=False),
        ]:
            own = plain_name(model, name)
            if first.setdefault(id(tensor), own) != own:
                tied[own] = first[id(tensor)]
        state = get_model_state_dict(model)
        tied = {name: target for name, target in tied.items() if name in state and target in state}
        tensors = {n: value for n, value in state.items() if isinstance(value, torch.Tensor) and n not in tied}
        return cls(tensors, tied, any(not isinstance(value, torch.Tensor) for value in state.values()))

    @property
    def names(self) -> set[str]:
        """All names, those of tied tensors included."""
        return {*self.tensors, *self.tied}

    def names_of(self, name: str) -> list[str]:
        """Return all names of a tensor, its own first."""
        return [name, *(other for other, target in self.tied.items() if target == name)]


@dataclass(frozen=True)
class Fitting:
    """Weights that fit a model.

    Attributes:
        source: Where they come from.
        names: The name that each of the model's tensors has there; on ranks that don't know, its own.
    """

    source: Source
    names: Mapping[str, str]

    def fill(self, model: nn.Module) -> None:
        """Give a model these values, in place. To be called on all ranks.

        Raises:
            CheckpointError: They could not be read on some rank; the model holds a part of them.
        """
        with agreement.together():
            tensors = ModelTensors.of(model)
            self.source.fill([(self.names[name], tensor) for name, tensor in tensors.tensors.items()])
            if tensors.extra:
                set_model_state_dict(model, get_model_state_dict(model))  # modules that keep more hear of it


def fit(model: nn.Module, source: Source, told: str) -> Fitting:
    """Return weights under the names of a model. Nothing is read, and nothing changes.

    Args:
        model: Plain or distributed; on any device.
        source: Where the weights come from.
        told: What the user calls it.

    Raises:
        UsageError: They are those of another model: too few, too many, or of other shapes.
    """
    tensors, shapes = ModelTensors.of(model), source.shapes()
    if shapes is None:
        return Fitting(source, {name: name for name in tensors.tensors})
    naming = max(_namings(model, tensors, shapes), key=lambda naming: naming.count(tensors, shapes))
    names = {name: naming.of(tensors, name, shapes) for name in tensors.tensors}
    differences = []
    for name, tensor in tensors.tensors.items():
        known = names[name]
        if known not in shapes:
            differences.append(f"{name} is missing there")
        elif list(shapes[known]) != list(tensor.shape):
            differences.append(f"{name} is {list(shapes[known])} there and {list(tensor.shape)} here")
    differences += [f"{name} is only there" for name in _strangers(model, tensors, source, shapes, naming)]
    if differences:
        raise UsageError(f"{told} holds another model: {listed(differences)}. Nothing was loaded")
    return Fitting(source, names)


# --- names


@dataclass(frozen=True)
class _Naming:
    """How names there differ from the model's own.

    Attributes:
        added: What stands before them there.
        dropped: What stands before the model's own, and not there.
    """

    added: str = ""
    dropped: str = ""

    def of(self, tensors: ModelTensors, name: str, shapes: Shapes) -> str:
        """Return the name of a tensor there, under whichever of its own names it is there."""
        known = [self.there(own) for own in tensors.names_of(name)]
        return next((name for name in known if name in shapes), known[0])

    def there(self, name: str) -> str:
        return self.added + name.removeprefix(self.dropped)

    def count(self, tensors: ModelTensors, shapes: Shapes) -> int:
        return sum(self.of(tensors, name, shapes) in shapes for name in tensors.tensors)


def _namings(model: nn.Module, tensors: ModelTensors, shapes: Shapes) -> Iterator[_Naming]:
    """Yield the model's own names, those of the model inside it (GPT-2 below a head), and those of one inside both."""
    yield _Naming()
    if inner := getattr(model, "base_model_prefix", ""):
        yield _Naming(dropped=f"{inner}.")
    first = next(iter(tensors.tensors), "")
    for known in shapes:
        if first and known.endswith(f".{first}"):
            yield _Naming(added=known.removesuffix(first))


def _strangers(
    model: nn.Module, tensors: ModelTensors, source: Source, shapes: Shapes, naming: _Naming
) -> Iterator[str]:
    """Yield names found only there, except what a transformers model can do without and what isn't part of a model."""
    own = {naming.there(name) for name in (*tensors.tensors, *tensors.tied, *dict(model.named_buffers()))}
    if (stages := stages_of(model)) is not None:
        own |= {naming.there(name) for name in stages.forms}
    children = {name.split(".")[0] for name in own}
    ignored = [re.compile(text) for text in getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()]
    for known in shapes:
        is_others = not known.startswith(naming.added) or not (source.exclusive or known.split(".")[0] in children)
        is_optional = _OLD_BUFFERS.fullmatch(known) or any(pattern.search(known) for pattern in ignored)
        if known not in own and not is_others and not is_optional:
            yield known


# --- models on the meta device


def set_buffers(model: nn.Module, device: torch.device) -> None:
    """Give buffers on the meta device that no file holds the values that their modules compute.

    Args:
        model: Plain or sharded.
        device: Where these buffers go.

    Raises:
        UsageError: A module can't. Nothing has changed.
    """
    kept = ModelTensors.of(model)
    unset = [
        (prefix, module, name)
        for prefix, module in model.named_modules()
        for name, buffer in module.named_buffers(recurse=False)
        if buffer.is_meta and plain_name(model, f"{prefix}.{name}" if prefix else name) not in kept.names
    ]
    before = [(module, name, module._buffers[name]) for _, module, name in unset]
    made: dict[int, torch.Tensor] = {}
    for module, name, buffer in before:
        module._buffers[name] = made.setdefault(id(buffer), _marked(buffer))
    with torch.no_grad():
        for module, prefix in {module: prefix for prefix, module, _ in unset}.items():
            if (initialize := _initializer(model, prefix, module)) is not None:
                initialize()
    lacking = [f"{f'{prefix}.' if prefix else ''}{name}" for prefix, module, name in unset if _is_marked(module, name)]
    if lacking:
        for module, name, buffer in before:
            module._buffers[name] = buffer
        raise UsageError(
            f"buffers on the meta device are in no file, and nothing sets them: {listed(lacking)}. Give their modules "
            "a reset_parameters() that does, or build the model on the CPU. Nothing was loaded"
        )
    moved: dict[int, torch.Tensor] = {}
    for _, module, name in unset:
        buffer = module._buffers[name]
        assert buffer is not None
        module._buffers[name] = moved.setdefault(id(buffer), buffer.to(device))


def _initializer(model: nn.Module, prefix: str, module: nn.Module) -> Callable[[], Any] | None:
    """Return what sets a module's buffers: itself, or the model of transformers that it belongs to."""
    if (own := initializer(module)) is not None:
        return own
    parts = prefix.split(".") if prefix else []
    for length in range(len(parts), -1, -1):
        initialize = getattr(model.get_submodule(".".join(parts[:length])), "_init_weights", None)
        if callable(initialize):
            return lambda: initialize(module)
    return None


def _marked(buffer: torch.Tensor) -> torch.Tensor:
    """Return a CPU buffer with values that no module sets, to detect whether it was written."""
    if buffer.dtype == torch.bool:
        return (torch.arange(buffer.numel(), device="cpu") % 2 == 0).view(buffer.shape)
    is_whole = not (buffer.is_floating_point() or buffer.is_complex())
    return torch.full_like(buffer, torch.iinfo(buffer.dtype).max if is_whole else float("nan"), device="cpu")


def _is_marked(module: nn.Module, name: str) -> bool:
    buffer = module._buffers[name]
    if buffer is None or not buffer.numel():
        return False
    return torch.allclose(buffer, _marked(buffer), rtol=0, atol=0, equal_nan=True)


def give_storage(model: nn.Module, device: torch.device, parameters_on: torch.device | None = None) -> None:
    """Give storage, without values, to what is on the meta device, and leave all else. What is tied stays tied.

    Args:
        model: Plain or sharded.
        device: Where to.
        parameters_on: Where parameters go, if that is elsewhere.

    Raises:
        UsageError: A part of a sharded model is on the meta device.
    """
    if not any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers())):
        return
    if not any(isinstance(parameter, DTensor) for parameter in model.parameters()):
        _replace_meta(model, device)
        return
    if any(not parameter.is_meta for parameter in model.parameters()):
        raise UsageError("a part of the sharded model is on the meta device: build all of it there, or nothing")
    buffers = [(module, name) for module in model.modules() for name, _ in module.named_buffers(recurse=False)]
    before = [module._buffers[name] for module, name in buffers]
    model.to_empty(device=parameters_on or device)
    for (module, name), buffer in zip(buffers, before, strict=True):
        assert buffer is not None
        module._buffers[name] = torch.empty_like(buffer, device=device) if buffer.is_meta else buffer.to(device)


def _replace_meta(model: nn.Module, device: torch.device) -> None:
    made: dict[int, torch.Tensor] = {}
    parameters = list(model.named_parameters(remove_duplicate=False))
    for name, tensor in [*parameters, *model.named_buffers(remove_duplicate=False)]:
        if not tensor.is_meta:
            continue
        if id(tensor) not in made:
            fresh = torch.empty_like(tensor, device=device)
            is_parameter = isinstance(tensor, nn.Parameter)
            made[id(tensor)] = nn.Parameter(fresh, tensor.requires_grad) if is_parameter else fresh
        owner, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(owner), attribute, made[id(tensor)])
