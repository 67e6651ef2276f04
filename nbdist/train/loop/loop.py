"""The loop: micro-batches gathered into windows, backward, and what a user asks of a prepared model.

    for batch in loader:
        with nbdist.accumulate(model):
            loss = loss_of(model(batch))
            nbdist.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()

Independent of how models are distributed beyond how their gradients' exchange is put off.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms.join import Join, Joinable
from torch.nn.parallel import DistributedDataParallel

from nbdist.errors import UsageError
from nbdist.train import state as training
from nbdist.train.collective.turns import Flag
from nbdist.train.loop import precision
from nbdist.train.loop.gradients import parameters_of
from nbdist.train.sharding import zero_engine as engines
from nbdist.train.sharding.shards import drop_unexchanged, parameter_groups
from nbdist.train.state import Living, State


@Flag
def sync_gradients() -> bool:
    """Return whether the current micro-batch ends with an optimizer step; after `accumulate`, whether the last one did.

    Without parentheses, too: `if nbdist.sync_gradients:`.
    """
    return training.current().sync_gradients


@Flag
def optimizer_step_was_skipped() -> bool:
    """Return whether the last step of a prepared optimizer was skipped because a gradient was inf or NaN (fp16)."""
    return any(record.skipped for record in training.current().records.values())


def backward(loss: torch.Tensor, **kwargs: Any) -> None:
    """Compute gradients of a loss, divided by the length of the accumulation window, scaled under fp16.

    Args:
        loss: One number, the mean over this rank's micro-batch.
        kwargs: As for `torch.Tensor.backward`.

    Raises:
        UsageError: The loss is not a tensor.
    """
    if not isinstance(loss, torch.Tensor):
        raise UsageError(
            f"backward takes a loss that is a tensor, not {type(loss).__name__}, for example backward(loss)"
        )
    state = training.current()
    state.backward_made = True
    if state.window > 1:
        loss = loss / state.window
    if models := engines.engines_among(state.models):
        engines.backward(models, loss, **kwargs)
        return
    precision.scaled(state, loss).backward(**kwargs)


@contextmanager
def accumulate(*models: nn.Module) -> Iterator[None]:
    """Run one micro-batch; the optimizer steps at the end of each window of the plan's `accumulate` micro-batches.

    Inside of a window gradients are not exchanged, unless the plan's `exchange` is "each", and the prepared optimizers'
    `step` and `zero_grad` and the schedulers' `step` do nothing. The last window of a pass over a prepared loader may
    be shorter; its gradients are the mean over its own length.

    Args:
        models: The models that are trained in it; all prepared ones by default.

    Raises:
        UsageError: A model is not a prepared one.
    """
    state = training.current()
    for model in models:
        if model not in state.models:
            raise UsageError(
                f"accumulate was given a {type(model).__name__} that was not prepared, or was prepared under an "
                "earlier plan: call model = nbdist.prepare(model) first"
            )
    _begin_micro_batch(state)
    chosen = models or tuple(state.models)
    try:
        with nullcontext() if state.sync_gradients or state.plan.exchange == "each" else _without_exchange(chosen):
            yield
    except Exception:  # caught by the user, ranks are still at the same micro-batch
        _end_micro_batch(state)
        raise
    except BaseException:  # interrupted, they may not be
        give_up_window(state)
        raise
    _end_micro_batch(state)


def give_up_window(state: State) -> None:
    """Drop what micro-batches have gathered since the last step: the next one is the first of a window."""
    precision.forget_unscaled(state)
    state.abandon_window()
    for parameter in itertools.chain.from_iterable(map(parameters_of, state.optimizers)):
        parameter.grad = None
    for model in engines.engines_among(state.models):
        engines.drop_gradients(model)
    for part in itertools.chain.from_iterable(_sharded_parts(state, model) for model in state.models):
        for group in parameter_groups(part._get_fsdp_state()):
            drop_unexchanged(group)


def _begin_micro_batch(state: State) -> None:
    loader = state.loader
    if state.micro_step == 0:
        training.before_loop()
        left = getattr(loader, "batches_left", None)
        state.window = state.plan.accumulate if left is None else min(state.plan.accumulate, 1 + left)
    state.micro_step += 1
    state.backward_made = False
    state.sync_gradients = state.micro_step >= state.window or bool(getattr(loader, "end_of_loader", False))
    state.correction = state.window / state.micro_step if state.sync_gradients else 1.0


def _end_micro_batch(state: State) -> None:
    if state.sync_gradients:
        state.micro_step, state.window = 0, 1


@contextmanager
def no_sync(model: nn.Module) -> Iterator[None]:
    """Keep the gradients of a prepared model on each rank: the next backward outside exchanges them with its own.

    Optimizers step as usual. For windows of micro-batches `accumulate` is simpler.
    """
    with _without_exchange([model]):
        yield


@contextmanager
def _without_exchange(models: Iterable[nn.Module]) -> Iterator[None]:
    with ExitStack() as stack:
        for model in models:
            if isinstance(model, DistributedDataParallel):
                stack.enter_context(model.no_sync())
            elif isinstance(model, engines.DeepSpeedModel):
                stack.enter_context(engines.gathering(model))
            elif parts := _sharded_parts(training.current(), model):
                stack.callback(_exchange, parts, True)
                _exchange(parts, False)
        yield


def _exchange(parts: Iterable[Any], wanted: bool) -> None:
    for part in parts:
        part.set_requires_gradient_sync(wanted, recurse=False)


def _sharded_parts(state: State, model: nn.Module) -> Sequence[Any]:
    """Return FSDP's modules in a model. Looked up once: a model may have thousands of modules."""
    from torch.distributed.fsdp import FSDPModule

    if not isinstance(model, FSDPModule):
        return ()
    parts = state.sharded_parts.get(model)
    if parts is None:
        parts = state.sharded_parts[model] = Living(part for part in model.modules() if isinstance(part, FSDPModule))
    return parts  # type: ignore[no-any-return]


def unwrap(model: nn.Module) -> nn.Module:
    """Return the model as the user wrote it: what DDP, torch.compile or DeepSpeed's engine wraps.

    A model under FSDP2 is still the user's object, and an instance of the user's class; its parameters are sharded.
    """
    if isinstance(model, engines.DeepSpeedModel):
        return unwrap(engines.unwrapped(model))
    inner = model.module if isinstance(model, DistributedDataParallel) else getattr(model, "_orig_mod", None)
    return unwrap(inner) if isinstance(inner, nn.Module) else model


@contextmanager
def join_uneven_inputs(joinables: Iterable[Any], even_batches: bool | None = None) -> Iterator[None]:
    """Let ranks have different numbers of batches: who is out of data joins in the others' exchanges (DDP only).

    Args:
        joinables: The prepared models, as in `[model]`.
        even_batches: Overrides the plan's `even_batches` for loops over prepared loaders inside this context.

    Raises:
        UsageError: A model is sharded: only DDP can do this.
    """
    state = training.current()
    joinables = list(joinables)
    if training.world_size() > 1:
        _refuse_unjoinable(state, joinables)
    loaders = [loader for loader in state.loaders if hasattr(loader, "even_batches")]
    before = [loader.even_batches for loader in loaders]
    state.joining = True
    try:
        if even_batches is not None:
            for loader in loaders:
                loader.even_batches = even_batches
        replicated: list[Joinable] = [model for model in joinables if isinstance(model, DistributedDataParallel)]
        with Join(replicated) if replicated else nullcontext():
            yield
    finally:
        state.joining = False
        for loader, value in zip(loaders, before, strict=True):
            loader.even_batches = value


def _refuse_unjoinable(state: State, joinables: Iterable[Any]) -> None:
    if state.plan.accumulate > 1:
        raise UsageError("join_uneven_inputs can't be combined with accumulation: set accumulate=1 in the plan")
    for model in joinables:
        if _sharded_parts(state, model) or isinstance(model, engines.DeepSpeedModel):
            raise UsageError(
                f"join_uneven_inputs works for DDP, and {type(unwrap(model)).__name__} is sharded: let the loader fill "
                "up the tail (even_batches=True in the plan)"
            )
