"""Whether ranks gave `prepare` the same: one plan, and objects that are alike on all of them."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from nbdist.base.ranks import describe_ranks
from nbdist.plan import Plan
from nbdist.train.checkpoint.weight_sources import described
from nbdist.train.collective.agreement import differing, gather, refuse_differing
from nbdist.train.loop.stepping import describe_groups
from nbdist.train.pipeline.stages import stages_of
from nbdist.train.prepare.strategies import strategy_in_effect

_MODEL, _LOADER, _OTHER = "model", "loader", "other"
_SHARES = (
    "Each rank takes its share of one order of the same samples, so make data and samplers with the same seed on all "
    "ranks. For data that differs on purpose, use nbdist.prepare_loader(loader, sharded=True)"
)


@dataclass(frozen=True)
class _Given:
    """What a rank gave.

    Attributes:
        plan: In words.
        objects: Each kind of object, and the object in words, in order; weights last.
        samples: Of each loader, a digest of some samples; "" where none is compared.
    """

    plan: str = ""
    objects: tuple[tuple[str, str], ...] = ()
    samples: tuple[str, ...] = ()


def refuse_disagreement(failure: str, plan: Plan | None, objects: Sequence[Any], weights: Any) -> None:
    """Raise an error on all ranks if they were given different things, or one of them something wrong.

    Args:
        failure: What is wrong on this rank; empty if nothing is.
        plan: The plan; None if that is what is wrong.
        objects: What is to be prepared.
        weights: What the model begins with.

    Raises:
        UsageError: The text is the same on all ranks, and names the first difference.
    """
    given = _Given() if failure or plan is None else _given(plan, objects, weights)
    told = differing("prepare", given, failure)
    if not told:
        return
    refuse_differing("prepare", [theirs.plan for theirs in told], what="plans")
    _refuse_objects([theirs.objects for theirs in told], objects)
    _warn_of_samples([theirs.samples for theirs in told])


def _given(plan: Plan, objects: Sequence[Any], weights: Any) -> _Given:
    shared = strategy_in_effect(plan) != "none" and not plan.dispatch  # else each rank reads data of its own, or none
    described_objects = [_described(thing, shared, is_whole=plan.pp == 1) for thing in objects]
    if weights is not None:
        described_objects.append((_OTHER, described(weights)))
    samples = [_samples(thing) for thing in objects if shared and isinstance(thing, DataLoader)]
    return _Given(_described_plan(plan), tuple(described_objects), tuple(samples))


def _described_plan(plan: Plan) -> str:
    default = Plan()
    changed = {name: value for name, value in vars(plan).items() if value != getattr(default, name)}
    return f"Plan({', '.join(f'{name}={_told(value)}' for name, value in changed.items())})"


def _told(value: Any) -> str:
    """Return a setting's value, the same on all ranks: no function by its address."""
    return getattr(value, "__qualname__", type(value).__name__) if callable(value) else repr(value)


def _described(thing: Any, shared: bool, *, is_whole: bool) -> tuple[str, str]:
    """Return an object in words. `is_whole`: whether optimizers have the parameters of all stages."""
    name = type(thing).__name__
    if isinstance(thing, nn.Module):
        if (stages := stages_of(thing)) is not None:
            return _MODEL, f"{name} ({stages.size:,} parameters in {stages.count} stages)"
        size = sum(tensor.numel() for tensor in thing.parameters())
        form = hashlib.md5(repr(_tensors(thing)).encode()).hexdigest()[:6]
        return _MODEL, f"{name} ({size:,} parameters, form {form})"
    if isinstance(thing, DataLoader):
        return _LOADER, _described_loader(thing) if shared else name
    return _OTHER, describe_groups([thing])[0] if is_whole and isinstance(thing, Optimizer) else name


def _tensors(model: nn.Module) -> list[tuple[str, tuple[int, ...], str]]:
    """Return the name, shape and type of each parameter and buffer, in the order in which DDP sends them."""
    named = [*model.named_parameters(), *model.named_buffers()]
    return [(name, tuple(tensor.shape), str(tensor.dtype)) for name, tensor in named]


def _described_loader(loader: DataLoader[Any]) -> str:
    from nbdist.train.data.likeness import describe
    from nbdist.train.data.loader import PreparedLoader

    return "a prepared loader" if isinstance(loader, PreparedLoader) else describe(loader)


def _samples(loader: DataLoader[Any]) -> str:
    from nbdist.train.data.likeness import contents
    from nbdist.train.data.loader import PreparedLoader

    return "" if isinstance(loader, PreparedLoader) else contents(loader)


def _refuse_objects(told: Sequence[Sequence[tuple[str, str]]], objects: Sequence[Any]) -> None:
    kinds = [[kind for kind, _ in theirs] for theirs in told]
    if any(theirs != kinds[0] for theirs in kinds):
        refuse_differing("prepare", [", ".join(text for _, text in theirs) for theirs in told], what="objects")
    for place, kind in enumerate(kinds[0]):
        texts = [theirs[place][1] for theirs in told]
        if all(text == texts[0] for text in texts):
            continue
        if kind == _MODEL:
            advice = f"{_first_difference(gather(_tensors(objects[place])))}Build the model the same way on all ranks"
            refuse_differing("prepare", texts, what="objects", advice=advice)
        if kind == _LOADER:
            refuse_differing("prepare", texts, what="objects", advice=_SHARES)
        refuse_differing("prepare", texts, what="objects")


def _first_difference(told: Sequence[Sequence[tuple[str, tuple[int, ...], str]]]) -> str:
    """Return the first parameter or buffer that is another one on some rank, in words; "" if only classes differ."""
    for rank, theirs in enumerate(told):
        for first, other in zip_longest(told[0], theirs):
            if first != other:
                return f"The first difference: {_in_words(first)} on rank 0, {_in_words(other)} on rank {rank}. "
    return ""


def _in_words(tensor: tuple[str, tuple[int, ...], str] | None) -> str:
    if tensor is None:
        return "nothing"
    name, shape, dtype = tensor
    return f"{name!r} {shape} {dtype.removeprefix('torch.')}"


def _warn_of_samples(told: Sequence[Sequence[str]]) -> None:
    """Warn where only samples differ: made up for a trial, they may as well be others on each rank."""
    others = [rank for rank, samples in enumerate(told) if samples != told[0]]
    if others:
        warnings.warn(
            f"{describe_ranks(others)} {'holds' if len(others) == 1 else 'hold'} other samples than rank 0. {_SHARES}",
            stacklevel=4,
        )
