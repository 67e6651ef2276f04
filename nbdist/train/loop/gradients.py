"""Gradients once they are whole: the mean over a window, norms over all shards, clipping.

Independent of strategies: a gradient is a tensor or a DTensor.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from nbdist.errors import UsageError
from nbdist.train import state as training
from nbdist.train.loop import precision
from nbdist.train.pipeline.stages import counted_elsewhere, norm_over_stages
from nbdist.train.sharding import zero_engine as engines
from nbdist.train.state import State

Optimizers = torch.optim.Optimizer | Iterable[torch.optim.Optimizer] | None
Parameters = nn.Module | torch.Tensor | Iterable[torch.Tensor]


def clip_grad_norm_(parameters: Parameters, max_norm: float, norm_type: float = 2.0) -> torch.Tensor | None:
    """Scale gradients down so that their norm, over all parameters and all shards of them, is `max_norm` at most.

    Under fp16 gradients are brought back to those of the loss first.

    Args:
        parameters: A model, or parameters.
        max_norm: The largest norm allowed, above 0.
        norm_type: Which norm: 2.0, 1.0, `float("inf")`, ...

    Returns:
        The norm before clipping, the same on all ranks. None inside an accumulation window: nothing is clipped there,
        as gradients are not whole yet.

    Raises:
        UsageError: `max_norm` is not a positive number, or DeepSpeed's engine has the gradients.
    """
    _refuse_bad_limit("max_norm", max_norm)
    state = training.current()
    _refuse_engine("clip_grad_norm_", state)
    if not state.sync_gradients:
        return None
    chosen = _listed(parameters)
    _make_whole(state, chosen)
    return clip_by_norm(chosen, max_norm, norm_type)


def clip_grad_value_(parameters: Parameters, clip_value: float) -> None:
    """Cut each gradient's elements off at `-clip_value` and `clip_value`. Does nothing inside an accumulation window.

    Raises:
        UsageError: `clip_value` is not a positive number, or DeepSpeed's engine has the gradients.
    """
    _refuse_bad_limit("clip_value", clip_value)
    state = training.current()
    _refuse_engine("clip_grad_value_", state)
    if not state.sync_gradients:
        return
    chosen = _listed(parameters)
    _make_whole(state, chosen)
    for gradient in _gradients(chosen):
        (gradient.to_local() if isinstance(gradient, DTensor) else gradient).clamp_(-clip_value, clip_value)


def unscale_gradients(optimizer: Optimizers = None) -> None:
    """Bring gradients back to those of the loss under fp16, as to look at them; clipping does so by itself.

    Does nothing inside an accumulation window, nor in another precision.

    Args:
        optimizer: A prepared optimizer, several, or None for all of them.

    Raises:
        UsageError: An optimizer was not prepared, or DeepSpeed's engine has the gradients.
    """
    state = training.current()
    _refuse_engine("unscale_gradients", state)
    listed = [optimizer] if isinstance(optimizer, torch.optim.Optimizer) else optimizer
    chosen = list(state.optimizers if listed is None else listed)
    for each in chosen:
        if each not in state.optimizers:
            raise UsageError(
                f"unscale_gradients was given a {type(each).__name__} that was not prepared: call "
                "optimizer = nbdist.prepare(optimizer) first"
            )
    if state.scaler is None or not state.sync_gradients:
        return
    finish_window(state)
    for each in chosen:
        precision.unscale(state, each)


def clip_by_norm(parameters: Iterable[torch.Tensor], max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
    """Clip whole gradients; see `clip_grad_norm_`."""
    parameters = list(parameters)
    if training.current().stages is None:
        norm = total_norm(_gradients(parameters), norm_type)
    else:
        norm = _norm_of_pipeline(parameters, norm_type)
    for group in _alike(parameters):
        clip_grads_with_norm_(group, max_norm, norm.to(group[0].device))
    return norm


def _norm_of_pipeline(parameters: Iterable[torch.Tensor], norm_type: float) -> torch.Tensor:
    """Return the norm over all stages. What two of them have is counted once."""
    state = training.current()
    elsewhere = counted_elsewhere(state.models)
    own = _gradients(parameter for parameter in parameters if id(parameter) not in elsewhere)
    return norm_over_stages(total_norm(own, norm_type), norm_type, state.stages.group, state.device)


def total_norm(gradients: Iterable[torch.Tensor], norm_type: float = 2.0) -> torch.Tensor:
    """Return the norm of all gradients together, shards of other ranks included."""
    norms = []
    for group in _alike(gradients):
        norm = get_total_norm(group, norm_type)
        norms.append(norm.full_tensor() if isinstance(norm, DTensor) else norm)
    if len(norms) == 1:
        return norms[0]
    return get_total_norm([norm.to(norms[0].device) for norm in norms], norm_type)


def finish_window(state: State) -> None:
    """Let gradients be the mean over the window's own length, if it turned out to be shorter than planned."""
    if state.correction == 1.0:
        return
    factor, state.correction = state.correction, 1.0
    state.window = max(1, state.micro_step)  # what other optimizers' losses in this micro-batch are divided by
    for model in (models := engines.engines_among(state.models)):
        engines.multiply_gradients(model, factor)
    if models:
        return
    chosen = {id(parameter): parameter for optimizer in state.optimizers for parameter in parameters_of(optimizer)}
    for gradient in _gradients(chosen.values()):
        gradient.mul_(factor)


def parameters_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Return all parameters that an optimizer steps."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _make_whole(state: State, parameters: Iterable[torch.Tensor]) -> None:
    finish_window(state)
    if state.scaler is None:
        return
    numbers = {id(parameter) for parameter in parameters}
    for optimizer in state.optimizers:
        if any(id(parameter) in numbers for parameter in parameters_of(optimizer)):
            precision.unscale(state, optimizer)


def _refuse_engine(function: str, state: State) -> None:
    if engines.engines_among(state.models):
        raise UsageError(
            f"{function} can't reach gradients under strategy 'deepspeed': DeepSpeed partitions them in backward, and "
            "clips them in the step. Set clip_grad_norm in the plan: `%distributed plan --clip-grad-norm 1.0`"
        )


def _listed(parameters: Parameters) -> list[torch.Tensor]:
    if isinstance(parameters, nn.Module):
        return list(parameters.parameters())
    return [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)


def _gradients(parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    return [parameter.grad for parameter in parameters if parameter.grad is not None]


def _alike(tensors: Iterable[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Return tensors by kind: torch can't mix whole and sharded ones, or meshes, in one operation."""
    groups: dict[object, list[torch.Tensor]] = {}
    for tensor in tensors:
        kind = tensor.device_mesh if isinstance(tensor, DTensor) else None
        groups.setdefault(kind, []).append(tensor)
    return list(groups.values())


def _refuse_bad_limit(name: str, value: float) -> None:
    if not isinstance(value, int | float) or isinstance(value, bool) or math.isnan(value) or value <= 0:
        raise UsageError(f"{name}={value!r} must be a number above 0, such as 1.0")
