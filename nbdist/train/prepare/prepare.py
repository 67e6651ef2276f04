"""`prepare`: models, optimizers, loaders and schedulers become what the plan says.

Owns which plan and which state are in effect, and that ranks agree before anything changes. How each kind of object is
prepared stands in `strategies`, `stepping` and the data modules. Independent of notebooks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from nbdist.errors import CheckpointError, UsageError
from nbdist.plan import Plan
from nbdist.planning.deepspeed import DeepSpeedConfig
from nbdist.planning.settings import SHARDED
from nbdist.train import state as training
from nbdist.train.checkpoint.weight_sources import open_source
from nbdist.train.checkpoint.weights import Fitting, fit, set_buffers
from nbdist.train.collective.agreement import gather
from nbdist.train.collective.process_group import ensure_group
from nbdist.train.loop.local_sgd import train_alone
from nbdist.train.loop.loop import give_up_window, unwrap
from nbdist.train.loop.precision import make_scaler, warn_of_emulation
from nbdist.train.loop.schedules import warn_of_length
from nbdist.train.loop.stepping import (
    is_scheduler,
    prepare_optimizer,
    prepare_scheduler,
    refuse_unshardable,
    step_by_engine,
    strange_parameters,
)
from nbdist.train.prepare import environment
from nbdist.train.prepare.given import refuse_disagreement
from nbdist.train.prepare.strategies import distribute, refuse_unfit, refuse_wrapped, strategy_in_effect
from nbdist.train.sharding import zero_engine
from nbdist.train.sharding.zero import refuse_overruled
from nbdist.train.state import State


def prepare(*objects: Any, plan: Plan | None = None, weights: Any = None) -> Any:
    """Make models, optimizers, loaders and schedulers train as the plan says. To be called on all ranks.

    >>> model, optimizer, loader, scheduler = nbdist.prepare(model, optimizer, loader, scheduler)

    The results are ordinary PyTorch objects. Optimizers and schedulers stay the objects they are, with the models' new
    parameters; a model is wrapped under DDP and DeepSpeed only; a loader gives each rank its share. Schedulers step
    once for each optimizer step however many ranks there are, so compute their length from the prepared loader. What
    was prepared already is given back as it is. Another plan than before begins a new training: what is prepared keeps
    the old one.

    A model that is too big for one process is built on the meta device and gets its weights here, each rank its part:

    >>> with torch.device("meta"):
    ...     model = AutoModelForCausalLM.from_config(config)
    >>> model = nbdist.prepare(model, weights="meta-llama/Llama-3.1-8B")

    Args:
        objects: In any order; None is passed through.
        plan: By default the one in effect: the session's, or that of NBDIST_PLAN in the environment.
        weights: What the one model among the objects begins with: a folder or file of safetensors, the name of a model
            on the Hugging Face hub, a checkpoint of `save_state` or `torch.distributed.checkpoint`, pickled weights
            that are tensors only; or a state dict on rank 0 and `{}` on the others. Values are converted to the model's
            types.

    Returns:
        The prepared objects in the same order; for one object, that object.

    Raises:
        UsageError: Nothing has changed: ranks disagree on the plan or on the objects, a model is wrapped already, an
            optimizer was made for other parameters, the plan does not fit the model or the ranks, weights do not fit
            the model or can't be found or read. On all ranks alike.
        CheckpointError: Reading the weights failed half way. The model has to be built again.
    """
    ensure_group()
    failure, fitting = "", None
    try:
        plan = Plan.from_environment() if plan is None else plan
        _check(objects, plan, weights)
        fitting = None if weights is None else _fitting(objects, weights)
    except (UsageError, CheckpointError) as error:
        failure = str(error)
    refuse_disagreement(failure, plan, objects, weights)
    assert plan is not None
    warn_of_emulation(plan, training.default_device())
    state = _state_for(plan)
    if state.device.type == "cuda":
        torch.cuda.set_device(state.device)
    results = _prepared(objects, state, fitting)
    return results[0] if len(results) == 1 else tuple(results)


def _state_for(plan: Plan) -> State:
    """Return the current state, or a new one if it has another plan or is untouched, on all ranks alike.

    Ranks may free what was prepared at different times.
    """
    if all(gather(training.is_begun() and training.current().plan == plan)):
        training.current().tidy()
        return training.current()
    device = training.default_device()
    environment.apply(plan, device)
    scaler = None if strategy_in_effect(plan) == "deepspeed" else make_scaler(plan, device)
    state = training.begin(plan)  # last: what fails above leaves the earlier one in effect
    state.scaler = scaler
    return state


def _fitting(objects: Sequence[Any], weights: Any) -> Fitting:
    """Return the weights under the names of the model, whose buffers that no file holds are set."""
    models = [thing for thing in objects if isinstance(thing, nn.Module)]
    if len(models) != 1:
        raise UsageError(f"weights are for one model, but prepare got {len(models)}: prepare them one by one")
    if len({parameter.is_meta for parameter in models[0].parameters()}) > 1:
        raise UsageError(
            "some of the model's parameters are on the meta device, and some are not: build all of it there"
        )
    told = "the state dict on rank 0" if isinstance(weights, Mapping) else str(weights)
    fitting = fit(models[0], open_source(weights), told)
    set_buffers(models[0], training.default_device())
    return fitting


def _prepared(objects: Sequence[Any], state: State, weights: Fitting | None) -> list[Any]:
    """Return models first: optimizers are to have their new parameters."""
    if state.micro_step and any(_is_new(thing, state) for thing in objects):
        give_up_window(state)  # that an earlier loop has left unfinished
    results = list(objects)
    sizes: list[tuple[int, int]] = []
    for index, thing in enumerate(objects):
        if isinstance(thing, nn.Module):
            results[index] = _prepared_model(thing, state, weights, objects)
    for index, thing in enumerate(objects):
        if isinstance(thing, Optimizer) and thing not in state.optimizers:
            prepare_optimizer(thing, state)
        elif isinstance(thing, DataLoader):
            results[index] = _prepared_loader(thing, state)
            sizes += _sizes(thing, results[index])
    for thing in objects:
        if is_scheduler(thing) and thing not in state.schedulers:
            prepare_scheduler(thing, state)
            warn_of_length(thing, sizes, state)
    return results


def _sizes(before: Any, after: Any) -> list[tuple[int, int]]:
    """Return the batches of a loader before and after it was prepared, if they are known."""
    try:
        return [(len(before), len(after))]
    except (TypeError, NotImplementedError):  # of an iterable dataset, or a sampler without a length
        return []


def _is_new(thing: Any, state: State) -> bool:
    if isinstance(thing, nn.Module):
        return _known_model(thing, state) is None
    return isinstance(thing, Optimizer) and thing not in state.optimizers


def _known_model(model: nn.Module, state: State) -> nn.Module | None:
    """Return the model as it was prepared; it may be passed bare when a cell runs again."""
    return next((known for known in state.models if model in (known, unwrap(known))), None)


def _prepared_model(model: nn.Module, state: State, weights: Fitting | None, objects: Sequence[Any]) -> nn.Module:
    if (known := _known_model(model, state)) is not None:
        if weights is not None:
            weights.fill(known)
        return known
    prepared = distribute(model, state, weights)
    if state.plan.local_sgd_steps:
        train_alone(prepared)
    if strategy_in_effect(state.plan) == "deepspeed":
        prepared = _engine(prepared, objects, state)
    state.add_model(prepared)
    return prepared


def _engine(model: nn.Module, objects: Sequence[Any], state: State) -> nn.Module:
    """Return DeepSpeed's engine for a model and the optimizer that is prepared with it."""
    optimizer = next(each for each in objects if isinstance(each, Optimizer) and each not in state.optimizers)
    sizes = [thing.batch_size for thing in objects if isinstance(thing, DataLoader) and thing.batch_size]
    # The loop counts micro-batches, as windows may be short: to DeepSpeed each is one micro-batch, computed in parts.
    config = DeepSpeedConfig.of(state.plan.replace(accumulate=1), min(sizes, default=1))
    prepare_optimizer(optimizer, state)  # first: it may have parameters without storage
    made = zero_engine.make(model, optimizer, config.entries(), state.device)
    step_by_engine(optimizer, made, state)
    return made


def _prepared_loader(loader: DataLoader[Any], state: State) -> Any:
    from nbdist.train.data.loaders import prepare_loader

    if loader in state.loaders:
        return loader
    alone = strategy_in_effect(state.plan) == "none"  # each rank trains by itself, on all of the data
    if alone:
        prepared = prepare_loader(loader, plan=state.plan, device=state.device, rank=0, world_size=1)
    else:
        prepared = prepare_loader(loader, plan=state.plan, device=state.device)
    state.loaders.append(prepared)
    return prepared


# --- what is refused, before anything changes


def _check(objects: Sequence[Any], plan: Plan, weights: Any) -> None:
    if not isinstance(plan, Plan):
        raise UsageError(f"plan={plan!r} is not a plan: pass plan=nbdist.Plan(strategy='fsdp')")
    if not objects:
        raise UsageError("prepare got nothing: write model, optimizer = nbdist.prepare(model, optimizer)")
    now = training.current() if training.is_begun() else State(plan, _NO_DEVICE)
    known = now if now.plan == plan else State(plan, _NO_DEVICE)
    plan.check(**_surroundings())
    for thing in objects:
        _refuse_unknown(thing)
        if isinstance(thing, nn.Module) and _known_model(thing, known) is None:
            if now is not known:
                _refuse_earlier(thing, now, plan)
            refuse_wrapped(thing, plan)
            refuse_unfit(thing, plan, has_weights=weights is not None)
        elif isinstance(thing, nn.Module) and weights is not None:
            refuse_overruled("prepare", thing.parameters())
    if strategy_in_effect(plan) == "none":
        return
    if strategy_in_effect(plan) == "deepspeed":
        _refuse_unpaired(objects, known)
    sharded = strategy_in_effect(plan) in SHARDED
    models = [thing for thing in objects if isinstance(thing, nn.Module)]
    parameters = {id(parameter) for model in (*models, *known.models) for parameter in model.parameters()}
    for thing in objects:
        if isinstance(thing, Optimizer):
            if sharded:
                refuse_unshardable(thing)
            if thing in known.optimizers:  # DeepSpeed has put its own parameters into it
                continue
            _refuse_strange(thing, strange_parameters(thing, parameters, known.replaced))


def _refuse_unpaired(objects: Sequence[Any], known: State) -> None:
    """Raise an error unless there is one model with its optimizer: DeepSpeed's engine is made of both."""
    models = [thing for thing in objects if isinstance(thing, nn.Module) and _known_model(thing, known) is None]
    optimizers = [thing for thing in objects if isinstance(thing, Optimizer) and thing not in known.optimizers]
    if not models and not optimizers:
        return
    if len(models) != 1 or len(optimizers) != 1:
        raise UsageError(
            f"strategy 'deepspeed' takes a model and its optimizer together, and prepare got {len(models)} and "
            f"{len(optimizers)} new ones: write model, optimizer = nbdist.prepare(model, optimizer). Leave models out "
            "that are not trained"
        )
    if optimizers[0].state:
        raise UsageError(
            f"DeepSpeed drops the state of an optimizer that has made steps: make the {type(optimizers[0]).__name__} "
            "again, or load a checkpoint of DeepSpeed's after prepare: model.load_checkpoint(folder)"
        )


_NO_DEVICE = torch.device("meta")


def _refuse_earlier(model: nn.Module, earlier: State, plan: Plan) -> None:
    """Raise an error for a model that an earlier plan sharded, or wrapped in DDP, which still exchanges gradients."""
    sharded = strategy_in_effect(earlier.plan) in (*SHARDED, "deepspeed")
    for other in earlier.models:
        inner = unwrap(other)
        if model not in (other, inner) or not (sharded or other is not inner):
            continue
        if plan.strategy != "none" or model is not other:
            raise UsageError(
                f"the {type(inner).__name__.removeprefix('FSDP')} was prepared under an earlier plan "
                f"({earlier.plan.strategy}), and is {'sharded' if sharded else 'wrapped'} for it: "
                "build the model and its optimizer again"
            )


def _surroundings() -> dict[str, Any]:
    import torch.distributed as dist

    device = training.default_device()
    backend = dist.get_backend_config() if training.has_group() else None
    return {
        "backend": "nccl" if backend == "cuda:nccl" else backend,
        "device": device,
        "world_size": training.world_size(),
        "capability": torch.cuda.get_device_capability(device) if device.type == "cuda" else None,
    }


def _refuse_unknown(thing: Any) -> None:
    if thing is None or isinstance(thing, nn.Module | Optimizer | DataLoader) or is_scheduler(thing):
        return
    if isinstance(thing, torch.amp.GradScaler):
        raise UsageError("prepare makes the GradScaler itself: leave it out, and set precision='fp16' in the plan")
    raise UsageError(
        f"prepare can't handle {type(thing).__name__!r} objects: give it models, optimizers, DataLoaders and schedulers"
    )


def _refuse_strange(optimizer: Optimizer, count: int) -> None:
    if count:
        raise UsageError(
            f"{count} of the parameters of {type(optimizer).__name__} belong to no prepared model: prepare the model "
            "in the same call, or make the optimizer from the parameters of the prepared model"
        )
