"""Averaged weights: an exponential moving average of what optimizers step, on each rank's own shards.

Owns how averages are kept, swapped in and put back. Whoever makes an optimizer's step says when one was made.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from nbdist.errors import UsageError
from nbdist.train import state as training
from nbdist.train.loop.gradients import parameters_of
from nbdist.train.loop.loop import unwrap
from nbdist.train.sharding.shards import gather_again
from nbdist.train.state import State
from nbdist.train.structure import float8


@contextmanager
def averaged(model: nn.Module) -> Iterator[nn.Module]:
    """Let a prepared model hold its averaged weights inside this context. To be called on all ranks.

    >>> with nbdist.averaged(model), torch.no_grad():
    ...     validate(model)

    The average follows each optimizer step as `torch.optim.swa_utils.AveragedModel` does with
    `get_ema_multi_avg_fn(plan.ema)`: the first step's weights, then ema * average + (1 - ema) * weights. Before the
    first step it is the weights themselves. Buffers are not averaged: the model keeps its own. The weights are put
    back afterwards, whatever happens inside; meanwhile a copy of this rank's part of them is kept.

    Args:
        model: A prepared model; `unwrap(model)` will do.

    Returns:
        The model.

    Raises:
        UsageError: The plan has no `ema`, the model was not prepared under it, or holds its averaged weights already.
            Inside of the context: an optimizer step, `save_state` and `load_state`.
    """
    state = training.current()
    refuse_without_average(model, state)
    kept: list[tuple[torch.Tensor, torch.Tensor]] = []
    state.averaged.append(model)
    try:
        _put_in(model, state, kept)
        yield model
    finally:
        gather_again(model)
        with torch.no_grad():
            for weights, copy in kept:
                weights.copy_(copy)
        float8.after_step([model], state.plan)
        state.averaged.remove(model)


def refuse_without_average(model: nn.Module, state: State) -> None:
    """Refuse a model that no averages are kept of, or that holds them already.

    Raises:
        UsageError: With what to type.
    """
    if not isinstance(model, nn.Module):
        raise UsageError(f"averaged takes a prepared model, not {type(model).__name__}")
    name = type(unwrap(model)).__name__.removeprefix("FSDP")
    if state.plan.ema is None:
        raise UsageError(
            f"no averaged weights of the {name} are kept, because the plan has no ema: use "
            "`%distributed plan --ema 0.999` or pass plan=nbdist.Plan(ema=0.999), and prepare the model under it"
        )
    if all(unwrap(model) is not unwrap(known) for known in state.models):
        raise UsageError(
            f"no averaged weights of the {name} are kept, because it was not prepared under this plan: call "
            "model, optimizer = nbdist.prepare(model, optimizer) first"
        )
    if any(unwrap(model) is unwrap(other) for other in state.averaged):
        raise UsageError(f"the {name} holds its averaged weights already: leave the inner nbdist.averaged out")


def refuse_inside(function: str, state: State) -> None:
    """Refuse what needs the weights themselves while a model holds its averaged ones.

    Raises:
        UsageError: Some model does.
    """
    if state.averaged:
        raise UsageError(f"inside nbdist.averaged the model holds its averaged weights: call {function} after it")


@torch.no_grad()
def update(state: State, optimizer: torch.optim.Optimizer) -> None:
    """Take the weights that an optimizer has just made into their averages."""
    if state.plan.ema is None:
        return
    averages, weights = [], []
    for parameter in parameters_of(optimizer):
        average = state.averages.get(parameter)
        if average is None:
            state.averages[parameter] = parameter.detach().to(_type_of(parameter), copy=True)
        elif average.dtype == parameter.dtype:
            averages.append(_local(average))
            weights.append(_local(parameter))
        else:
            _local(average).lerp_(_local(parameter).to(average.dtype), 1 - state.plan.ema)
    if averages:
        _lerp_each(averages, weights, 1 - state.plan.ema)


def _lerp_in_turn(averages: list[torch.Tensor], weights: list[torch.Tensor], share: float) -> None:
    for average, weight in zip(averages, weights, strict=True):
        average.lerp_(weight, share)


_lerp_each: Any = getattr(torch, "_foreach_lerp_", _lerp_in_turn)  # private, and faster


def empty_average(parameter: torch.Tensor) -> torch.Tensor:
    """Return what an average of this parameter is kept in, without values; a shard of it for a shard."""
    return torch.empty_like(parameter, dtype=_type_of(parameter), requires_grad=False)


def _type_of(parameter: torch.Tensor) -> torch.dtype:
    """Return the type of an average: in half precision it would stand still, since steps are below its last bit."""
    return torch.promote_types(parameter.dtype, torch.float32)


def _put_in(model: nn.Module, state: State, kept: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    gather_again(model)
    with torch.no_grad():
        for parameter in model.parameters():
            if (average := state.averages.get(parameter)) is not None:
                weights = _local(parameter)
                kept.append((weights, weights.clone()))
                weights.copy_(_local(average))
    float8.after_step([model], state.plan)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part, in the same memory."""
    local: torch.Tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.detach()


def averages_of(parameters: Iterable[tuple[str, torch.Tensor]], state: State) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the averages of named parameters, under the same names; of those that no step was made for, none."""
    for name, parameter in parameters:
        if (average := state.averages.get(parameter)) is not None:
            yield name, average
