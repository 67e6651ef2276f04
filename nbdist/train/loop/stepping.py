"""Prepared optimizers and schedulers: objects of their own classes, whose `step` knows of windows and of fp16.

Inside an accumulation window `step` and `zero_grad` do nothing, and after a step that fp16 skipped neither does the
scheduler's. Independent of models or loaders.
"""

from __future__ import annotations

import dis
import gc
import weakref
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer

from nbdist.errors import UsageError
from nbdist.metrics.allocation.oom import is_out_of_memory
from nbdist.train.loop import averages, precision
from nbdist.train.loop.gradients import clip_by_norm, finish_window, parameters_of
from nbdist.train.loop.local_sgd import average_parameters
from nbdist.train.sharding import zero_engine as engines
from nbdist.train.sharding.shards import gather_again
from nbdist.train.state import State, StepRecord
from nbdist.train.structure import float8
from nbdist.train.structure.shadow import shadow

Original = Callable[..., Any]


# --- optimizers

# Whose step an optimizer makes. Shadows of earlier trainings, and those of copies, do nothing: torch's schedulers wrap
# `step`, so one that is wrapped can't be taken off.
_trainings: MutableMapping[Optimizer, State] = weakref.WeakKeyDictionary()


def prepare_optimizer(optimizer: Optimizer, state: State) -> None:
    """Let an optimizer step at the end of windows only, with the parameters that its models have now."""
    take_new_parameters(optimizer, state.replaced)
    state.records[optimizer] = StepRecord()
    _trainings[optimizer] = state
    state.optimizers.append(optimizer)
    shadow(optimizer, "step", partial(_step, state))
    shadow(optimizer, "zero_grad", partial(_zero_grad, state))
    for name in _MODES:
        if callable(getattr(type(optimizer), name, None)):
            shadow(optimizer, name, partial(_switch, state))


_UNSHARDABLE = {  # by library and class: why
    ("torch", "Adafactor"): "it squares norms of rows in place, which PyTorch refuses where their parts are on ranks",
    ("transformers", "Adafactor"): "it adds its means of rows, which are whole, to those of shards",
}
_MODES = ("train", "eval")  # of schedule-free optimizers, which put other values into the parameters


def _switch(state: State, original: Original, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
    result = original(optimizer, *args, **kwargs)
    for model in state.models:
        gather_again(model)
    return result


def refuse_unshardable(optimizer: Optimizer) -> None:
    """Refuse an optimizer that is known not to step shards.

    Raises:
        UsageError: With the reason, and what to take instead.
    """
    for kind in type(optimizer).__mro__:
        library = kind.__module__.split(".")[0]
        if (why := _UNSHARDABLE.get((library, kind.__name__))) is not None:
            raise UsageError(
                f"{library}'s {kind.__name__} can't step sharded parameters: {why}. Use torchao.optim.AdamW8bit, which "
                "keeps a quarter of AdamW's state, or torch.optim.AdamW; or set strategy to 'ddp'"
            )


def _explaining_shards(original: Original, optimizer: Optimizer, *args: Any) -> Any:
    """Call a step. What torch refuses in it because parameters are sharded is raised with what to do instead."""
    try:
        return original(optimizer, *args)
    except RuntimeError as error:
        shards = any(isinstance(parameter, DTensor) for parameter in parameters_of(optimizer))
        if not shards or not _refuses_operands(error):
            raise
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise UsageError(
            f"the step of {type(optimizer).__name__} failed on sharded parameters (DTensors): {first}. Make its state "
            "with torch.zeros_like(parameter), or each part with parameter.to_local() if it computes element by "
            "element; else set strategy to 'ddp', or use torch.optim.AdamW"
        ) from error


def _refuses_operands(error: RuntimeError) -> bool:
    """Return whether an error is torch's answer to an operation on tensors, by where it comes from.

    That is DTensor's own Python, or C++ below a line that raises nothing itself. What an optimizer raises on its own
    account is passed on, and so is what failed while ranks exchanged something.
    """
    if isinstance(error, dist.DistError) or is_out_of_memory(error) or error.__traceback__ is None:
        return False
    innermost = error.__traceback__
    while innermost.tb_next is not None:
        innermost = innermost.tb_next
    module = str(innermost.tb_frame.f_globals.get("__name__"))
    if module.startswith("torch.distributed"):
        return module.startswith("torch.distributed.tensor")
    instruction = innermost.tb_frame.f_code.co_code[innermost.tb_lasti]
    return dis.opname[instruction] != "RAISE_VARARGS"


def take_new_parameters(optimizer: Optimizer, replaced: Mapping[torch.Tensor, torch.Tensor | None]) -> None:
    """Put new parameters into an optimizer's groups, in place, and shard what it already knows of the old ones.

    Those that stand for None are on other ranks.
    """
    for group in optimizer.param_groups:
        present = [replaced.get(parameter, parameter) for parameter in group["params"]]
        group["params"][:] = [parameter for parameter in present if parameter is not None]
    for old in [parameter for parameter in optimizer.state if isinstance(parameter, torch.Tensor)]:
        if old in replaced:
            new, known = replaced[old], optimizer.state.pop(old)
            if new is None:
                continue
            optimizer.state[new] = {name: _laid_out(value, old, new) for name, value in known.items()}


def _laid_out(value: Any, old: torch.Tensor, new: torch.Tensor) -> Any:
    if not isinstance(value, torch.Tensor) or value.shape != old.shape or not isinstance(new, DTensor):
        return value
    value = value.to(torch.device(new.device_mesh.device_type))
    return distribute_tensor(value, new.device_mesh, new.placements).to(new.device)


def strange_parameters(optimizer: Optimizer, known: set[int], replaced: Mapping[torch.Tensor, Any]) -> int:
    """Return how many of an optimizer's parameters belong to no model. `known`: the models' parameters, by `id`."""
    return sum(id(parameter) not in known and parameter not in replaced for parameter in parameters_of(optimizer))


def _step(state: State, original: Original, optimizer: Optimizer, closure: Any = None) -> Any:
    if _trainings.get(optimizer) is not state:
        return original(optimizer) if closure is None else original(optimizer, closure)
    record = state.records[optimizer]
    if record.inside is not None:
        return record.inside()
    if not state.sync_gradients:
        return None
    averages.refuse_inside("step()", state)
    if closure is not None:
        _refuse_closure(state)
    finish_window(state)
    if state.scaler is not None:
        precision.unscale(state, optimizer)
    if state.plan.clip_grad_norm is not None and record.model is None:
        clip_by_norm(parameters_of(optimizer), state.plan.clip_grad_norm)
    result = None
    original = partial(_explaining_shards, original)
    if record.model is not None:
        record.skipped = not _step_of_engine(record, partial(original, optimizer))
    elif state.scaler is not None:
        record.skipped = not precision.scaled_step(state, optimizer, original)
    else:
        result = original(optimizer) if closure is None else original(optimizer, closure)
    if not record.skipped:
        averages.update(state, optimizer)
    record.consumed = True
    record.attempts += 1
    for loader in state.active:
        loader.note_step()
    if optimizer is state.optimizers[-1]:
        state.steps += not record.skipped
        _after_attempt(state, record.attempts)
    return result


def step_by_engine(optimizer: Optimizer, model: engines.DeepSpeedModel, state: State) -> None:
    """Let a prepared optimizer and the engine that holds it make one step, whichever of both is called."""
    state.records[optimizer].model = weakref.ref(model)
    shadow(model.engine, "step", partial(_engines_own_step, state, weakref.ref(optimizer)))


def _engines_own_step(state: State, reference: Any, original: Original, engine: Any, *args: Any) -> Any:
    optimizer = reference()
    record = None if optimizer is None else state.records.get(optimizer)
    return optimizer.step() if record is not None and record.inside is None else original(engine, *args)


def _step_of_engine(record: StepRecord, step: Callable[[], Any]) -> bool:
    """Have an engine make its step, in which it calls the optimizer once for each part of the parameters."""
    model = record.model()
    if model is None:
        raise UsageError("the prepared model of this optimizer is gone: build and prepare both again")
    record.inside = step
    try:
        return engines.step(model)
    finally:
        record.inside = None


def _refuse_closure(state: State) -> None:
    """Raise an error for a closure, whose gradients inside the step would not be scaled, gathered or clipped."""
    wanted = {
        "precision fp16": state.scaler is not None,
        "accumulate": state.plan.accumulate > 1,
        "clip_grad_norm": state.plan.clip_grad_norm is not None,
        "strategy deepspeed": bool(engines.engines_among(state.models)),
    }
    unfit = [name for name, is_set in wanted.items() if is_set]
    if unfit:
        raise UsageError(
            f"a step with a closure can't be combined with {', '.join(unfit)}: leave that out of the plan, or call "
            "step() without a closure"
        )


def _after_attempt(state: State, attempts: int) -> None:
    """Do what is due every few steps. Skipped ones count: with fp16 and local SGD a rank may skip alone."""
    plan = state.plan
    float8.after_step(state.models, plan)
    if plan.local_sgd_steps and (attempts % plan.local_sgd_steps == 0 or getattr(state.loader, "end_of_loader", False)):
        for model in state.models:
            average_parameters(model)
    if plan.gc_interval and attempts % plan.gc_interval == 0:
        gc.collect()


def _zero_grad(state: State, original: Original, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
    """Zero gradients that a step has used, or that the user gives up; not what a window has gathered so far.

    Users zero before backward or behind the step, so the place in the window alone does not tell. With one optimizer,
    zeroing behind the last backward of a window without a step means that the user gives the window up.
    """
    if _trainings.get(optimizer) is not state:
        return original(optimizer, *args, **kwargs)
    record = state.records[optimizer]
    nothing_gathered = state.micro_step == 1 and not state.backward_made
    given_up = state.sync_gradients and state.backward_made and len(state.optimizers) == 1
    if not (record.consumed or state.window == 1 or nothing_gathered or given_up):
        return None
    if record.phase == "unscaled":
        precision.renew_scale(state)  # there was no step: the scaler is to begin again
    if record.model is not None:
        if not record.consumed and (model := record.model()) is not None:  # else its step has zeroed them
            engines.drop_gradients(model)
        record.consumed = False
        return None
    record.consumed = False
    return original(optimizer, *args, **kwargs)


# --- schedulers

_SHADOWED = ("step", "state_dict")


def prepare_scheduler(scheduler: Any, state: State) -> None:
    """Let a scheduler step whenever its optimizer does, once for each step however many ranks there are."""
    state.schedulers.append(scheduler)
    shadow(scheduler, "step", partial(_scheduler_step, state))
    shadow(scheduler, "state_dict", _scheduler_state)


def _scheduler_step(state: State, original: Original, scheduler: Any, *args: Any, **kwargs: Any) -> Any:
    if not state.sync_gradients:
        return None
    optimizer = getattr(scheduler, "optimizer", None)  # those of other libraries may have none
    record = None if optimizer is None else state.records.get(optimizer)
    if record is not None and record.skipped:
        return None
    return original(scheduler, *args, **kwargs)


def _scheduler_state(original: Original, scheduler: Any) -> Any:
    """Return the schedulers of torch give out all of their `__dict__`, in which the shadows stand, too."""
    known = original(scheduler)
    return {name: value for name, value in known.items() if name not in _SHADOWED} if isinstance(known, dict) else known


def is_scheduler(thing: Any) -> bool:
    """Return whether this is a learning-rate scheduler, torch's or one like them."""
    return not isinstance(thing, Optimizer | torch.nn.Module | torch.amp.GradScaler) and all(
        callable(getattr(thing, name, None)) for name in ("step", "state_dict")
    )


def describe_groups(optimizers: Sequence[Optimizer]) -> list[str]:
    """Return what ranks must agree on: each optimizer's class and how many parameters its groups have."""
    return [f"{type(opt).__name__}{[len(group['params']) for group in opt.param_groups]}" for opt in optimizers]
