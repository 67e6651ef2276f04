"""Models that a lost step has left half done: finds those that live in this rank and makes them ready for the next.

Leans on private parts of torch (FSDP2's state, GradScaler's state); each is probed when used, and a
missing one costs that model only, with a note. Independent of process groups' backends, cells or the wire: whoever
calls it has put the groups in order before, and calls it on all ranks, because a reset DDP model agrees on its
buckets again, with a collective, in its next forward.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import sys
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import compress
from typing import Any

from nbdist.train import active_training
from nbdist.train.sharding import ddp_reducer
from nbdist.train.sharding.shards import drop_unexchanged, parameter_groups


@dataclass(frozen=True)
class ResetReport:
    """What was reset.

    Attributes:
        models: Number of DDP and FSDP2 models that are ready again.
        gradients: Whether some parameter had a gradient, which is dropped.
        notes: What could not be revived, with what to type.
        statistics_stay: Whether BatchNorm statistics of the lost step stay.
    """

    models: int = 0
    gradients: bool = False
    notes: list[str] = field(default_factory=list)
    statistics_stay: bool = False


class _CannotRevive(Exception):
    """Why a model can't be made ready again."""


def let_groups_outlive_ddp() -> None:
    """Have DDP models that are freed let go of their process group last.

    A reducer that is the last to hold a gloo group ends the group's threads with the GIL held, and one of them may be
    waiting for it: the rank would hang forever where `destroy_process_group()` came before the end of the model.
    Python's own reference lets go of the GIL for that.
    """
    from torch.nn.parallel import DistributedDataParallel

    make_reducer = getattr(DistributedDataParallel, "_ddp_init_helper", None)
    if make_reducer is None:
        return

    @functools.wraps(make_reducer)
    def helper(model: object, *args: object, **kwargs: object) -> None:
        make_reducer(model, *args, **kwargs)
        state = vars(model)
        if "process_group" in state:  # attributes are freed in the order in which they were set
            state["process_group"] = state.pop("process_group")

    DistributedDataParallel._ddp_init_helper = helper  # type: ignore[method-assign,assignment]


def living(*kinds: type | None) -> list[Any]:
    """Return all objects of these classes and their subclasses that the garbage collector knows, except those of None.

    Only the objects' types are looked at: isinstance would ask proxies and other lazy objects for their class, which
    runs code of the user's. Objects that were there at a `gc.freeze()` are not found.
    """
    wanted = tuple(kind for kind in kinds if kind is not None)
    if not wanted:
        return []
    objects = gc.get_objects()
    try:
        matching = {kind for kind in set(map(type, objects)) if issubclass(kind, wanted)}
        return list(compress(objects, map(matching.__contains__, map(type, objects))))
    except TypeError:  # some class is unhashable, by a metaclass that defines __eq__
        return [thing for thing in objects if issubclass(type(thing), wanted)]


def loaded(module: str, name: str) -> type | None:
    """Return a class of a module, if that module is imported and has it. Nobody has an instance of it otherwise."""
    found = getattr(sys.modules.get(module), name, None)
    return found if isinstance(found, type) else None


def buckets_settled() -> bool:
    """Return whether the buckets of every living DDP model have their final layout on this rank."""
    found = living(loaded("torch.nn.parallel", "DistributedDataParallel"))
    return all(ddp_reducer.is_settled(model) for model in found if ddp_reducer.is_built(model))


def communicate_in(groups: Collection[Any]) -> bool:
    """Return whether a living DDP model, or a sharded parameter of one that is trained, uses one of these groups."""
    found = living(
        loaded("torch.nn.parallel", "DistributedDataParallel"),
        sharded := loaded("torch.distributed.fsdp", "FSDPModule"),
        optimizer := loaded("torch.optim", "Optimizer"),
    )
    replicated = [vars(model)["process_group"] for model in found if "process_group" in vars(model)]
    parameters = _parameters(_of(found, sharded), _of(found, optimizer))
    meshes = {id(mesh): mesh for each in parameters if (mesh := getattr(each, "device_mesh", None)) is not None}
    used = {*replicated, *(group for mesh in meshes.values() for group in mesh.get_all_groups())}
    return not used.isdisjoint(groups)


def begin_forwards_alike() -> None:
    """Let the next forward of every living DDP model share buffers. Enough where no rank was in a model or behind it.

    DDP does so unless the last forward was without gradients; some ranks may have had another since. From any thread.
    """
    for model in living(loaded("torch.nn.parallel", "DistributedDataParallel")):
        model.require_forward_param_sync = True


def reset_models(*, keep_buckets: bool = False, moved: Callable[[Any], bool] = lambda norm: True) -> ResetReport:
    """Make every living model ready for a step of its own, after one that did not end.

    DDP and FSDP2 models forget the collectives they waited for; gradients of these models and of what living
    optimizers train are dropped; gradient scalers forget the half step. Parameters and optimizer state stay as they
    are. To be called on the main thread, on all ranks or none, once the process groups work again.

    Args:
        keep_buckets: Whether DDP models keep the layout of their buckets, and with it the order in which more than
            two ranks are summed. Only right if `buckets_settled()` on all ranks. Else each gets a new reducer, which
            is right wherever its ranks have stopped.
        moved: Whether a BatchNorm layer's statistics may have moved in the lost step.

    Returns:
        What was reset. A model that can't be reset stops no other: it becomes a note.
    """
    if "torch" not in sys.modules:
        return ResetReport()
    ddp = loaded("torch.nn.parallel", "DistributedDataParallel")
    sharded = loaded("torch.distributed.fsdp", "FSDPModule")
    optimizer = loaded("torch.optim", "Optimizer")
    scaler = loaded("torch.amp", "GradScaler")
    norm = loaded("torch.nn.modules.batchnorm", "_NormBase")
    pipeline = loaded("nbdist.train.pipeline.passing", "Pipeline")
    hopeless = [loaded(module, name) for module, name in _HOPELESS]

    found = living(ddp, sharded, optimizer, scaler, norm, pipeline, *hopeless)
    notes: list[str] = []
    replicated = [model for model in _of(found, ddp) if ddp_reducer.is_built(model)]
    blocks = [block for block in _of(found, sharded) if _fsdp_state(block) is not None]
    gradients = _drop_gradients(_parameters(replicated, _of(found, optimizer)))  # before: they may be views of buckets
    reset_ddp = partial(_reset_ddp, keep_buckets=keep_buckets)
    models = _reset_each(replicated, reset_ddp, notes) + _reset_each(_fsdp_roots(blocks), _reset_fsdp, notes)
    gradients |= _drop_gradients(_parameters(blocks, ()))  # after: now they have their sharded parameters again
    _reset_each(_of(found, scaler), _reset_scaler, notes)
    for each in _of(found, pipeline):
        each.forget_batches()
    if active_training.training is not None:
        active_training.training.abandon_window()  # the micro-batches gathered before are lost, with their gradients
    for kind, advice in zip(hopeless, _HOPELESS.values(), strict=True):
        if _of(found, kind):
            notes.append(advice)
    stay = any(_keeps_statistics(module) and moved(module) for module in _of(found, norm))
    return ResetReport(models, gradients, list(dict.fromkeys(notes)), stay)


_HOPELESS = {
    ("torch.distributed.fsdp", "FullyShardedDataParallel"): (
        "FullyShardedDataParallel (FSDP1) can't continue after a lost step: build the model and its optimizer again, "
        "or use `torch.distributed.fsdp.fully_shard`, which can"
    ),
    ("deepspeed", "DeepSpeedEngine"): (
        "a DeepSpeed engine can't continue after a lost step: call `deepspeed.initialize` again (or build and prepare "
        "the model, if the plan made the engine) and load a checkpoint"
    ),
}


def _of(found: Iterable[Any], kind: type | None) -> list[Any]:
    return [] if kind is None else [thing for thing in found if issubclass(type(thing), kind)]


def _reset_each(things: Iterable[Any], reset: Any, notes: list[str]) -> int:
    """Reset all; what fails becomes a note. Returns how many were reset."""
    count = 0
    for thing in things:
        try:
            reset(thing)
            count += 1
        except _CannotRevive as reason:
            notes.append(f"{_title(thing)} can't continue after a lost step: {reason}")
        except Exception as error:  # torch's internals, or the user's class: the other models are reset all the same
            text = str(error).split("\n", 1)[0]
            notes.append(f"{_title(thing)} can't continue ({type(error).__name__}: {text}): build it again")
    return count


def _title(thing: object) -> str:
    inner = getattr(thing, "__dict__", {}).get("_modules", {}).get("module")
    name = type(thing).__name__
    return name if inner is None else f"{name}({type(inner).__name__})"


def _reset_ddp(model: Any, keep_buckets: bool) -> None:
    from torch.distributed import get_process_group_ranks

    try:
        get_process_group_ranks(model.process_group)
    except KeyError:
        raise _CannotRevive("its process group was destroyed; wrap the module again") from None
    model.require_forward_param_sync = True  # a forward without gradients clears it, and some ranks have had another
    if ddp_reducer.can_be_renewed(model) and not keep_buckets:
        ddp_reducer.renew_reducer(model)
        return
    if not hasattr(model, "_update_process_group"):
        raise _CannotRevive("this version of torch can't reset it; wrap the module in DistributedDataParallel again")
    settled = ddp_reducer.is_settled(model)
    model._update_process_group(model.process_group)
    ddp_reducer.note_settled(model, settled)  # which that call makes torch forget


def _fsdp_roots(blocks: Iterable[Any]) -> list[Any]:
    """Return the outermost modules, one per model. Before its first forward a module does not know that it is one."""
    return [block for block in blocks if _fsdp_state(block)._is_root is not False]


def _fsdp_state(block: Any) -> Any:
    """Return the state of a module that `fully_shard` was applied to, None where it did not get that far."""
    try:
        return block._get_fsdp_state()
    except Exception:  # a private method of torch's: what it raises is not promised
        return None


def _reset_fsdp(root: object) -> None:
    state = _fsdp_state(root)
    if state._is_root is None:
        _forget(state)  # an unshard() that was asked for before the first forward
        return
    for part in state._state_ctx.all_states:
        _forget(part)
    if hasattr(root, "reset_iter_state"):
        root.reset_iter_state()
    else:
        _reset_iteration(state)


def _reset_iteration(root: Any) -> None:
    """Do what `reset_iter_state` does, which `FSDPModule` has from torch 2.13 on."""
    shared, communication = root._state_ctx, root._comm_ctx
    current = communication.device_handle.current_stream()
    for name in ("all_gather_copy_in", "all_gather", "reduce_scatter", "all_reduce"):
        current.wait_stream(getattr(communication, f"{name}_stream"))
    communication.all_gather_state = communication.reduce_scatter_state = None
    getattr(communication, "reduce_scatter_states", []).clear()  # torch 2.12 has several
    communication.post_forward_order.clear()
    for part in shared.all_states:
        part._modules_to_run_forward.clear()
        part._training_state = type(part._training_state).IDLE
        for group in parameter_groups(part):
            group._training_state = type(group._training_state).IDLE
            group._post_reduce_event = group._all_reduce_state = group._reshard_after_forward_event = None
            group._partial_reduce_output = None
            group._post_forward_indices.clear()
            group._to_sharded()
    shared.iter_forward_root = None
    shared.post_backward_final_callback_queued = False


def _forget(state: object) -> None:
    """Drop what `reset_iter_state` would wait for in vain, and the two gradients that torch 2.13 leaves there."""
    for group in parameter_groups(state):
        group._all_gather_result = None
        drop_unexchanged(group)


def _reset_scaler(scaler: object) -> None:
    """Allow an optimizer whose gradients were unscaled in the lost step to be unscaled again."""
    states = getattr(scaler, "_per_optimizer_states", None)
    if isinstance(states, dict):
        states.clear()


def _parameters(modules: Iterable[Any], optimizers: Iterable[Any]) -> Iterator[Any]:
    for module in modules:
        yield from module.parameters()
    for optimizer in optimizers:
        with contextlib.suppress(Exception):  # one that is half made
            for group in optimizer.param_groups:
                yield from group["params"]


def _drop_gradients(parameters: Iterable[Any]) -> bool:
    """Set gradients to None, as `zero_grad()` does; DDP makes its views of buckets again."""
    dropped = False
    for parameter in parameters:
        if parameter.grad is not None:
            parameter.grad = None
            dropped = True
    return dropped


def _keeps_statistics(module: object) -> bool:
    return bool(getattr(module, "training", False) and getattr(module, "track_running_stats", False))
