"""What one process knows of its training: the plan, and what has been prepared. Independent of how any of it works.

One State at a time is current; the functions of `nbdist.train` work on it. It does not keep alive what was prepared:
a model that nobody else holds is gone, as when a cell that prepares one is run again.
"""

from __future__ import annotations

import gc
import os
import weakref
from collections.abc import Callable, Iterable, Iterator, MutableSequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar, overload

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from nbdist.metrics.node.host import trim_malloc
from nbdist.plan import Plan
from nbdist.planning import sharing
from nbdist.train import active_training

T = TypeVar("T")

COUNTERS = ("steps", "skipped_steps")  # of a State: what goes on after a load


class Living(MutableSequence[T]):
    """A list that holds its items weakly: what nobody else refers to is no longer in it."""

    def __init__(self, items: Iterable[T] = ()) -> None:
        self._references: list[Callable[[], T | None]] = [_weakly(item) for item in items]

    def _alive(self) -> list[T]:
        found = [(reference, reference()) for reference in self._references]
        self._references = [reference for reference, item in found if item is not None]
        return [item for _, item in found if item is not None]

    def __len__(self) -> int:
        return len(self._alive())

    def __iter__(self) -> Iterator[T]:
        return iter(self._alive())

    def __contains__(self, item: object) -> bool:
        return any(known is item for known in self._alive())

    @overload
    def __getitem__(self, index: int) -> T: ...
    @overload
    def __getitem__(self, index: slice) -> Living[T]: ...
    def __getitem__(self, index: int | slice) -> T | Living[T]:
        alive = self._alive()
        return Living(alive[index]) if isinstance(index, slice) else alive[index]

    def __setitem__(self, index: Any, item: Any) -> None:
        alive = self._alive()
        alive[index] = item
        self._references = [_weakly(item) for item in alive]

    def __delitem__(self, index: int | slice) -> None:
        self._alive()
        del self._references[index]

    def insert(self, index: int, item: T) -> None:
        """Insert like a list."""
        self._alive()
        self._references.insert(index, _weakly(item))

    def __repr__(self) -> str:
        return repr(self._alive())


def _weakly(item: T) -> Callable[[], T | None]:
    try:
        return weakref.ref(item)
    except TypeError:  # of a class with slots
        return lambda: item


@dataclass
class StepRecord:
    """What is known of a prepared optimizer.

    Attributes:
        consumed: Whether a step has used its gradients, and they were not zeroed since.
        skipped: Whether its last step was not made, as a gradient was no number (fp16).
        phase: Under fp16: whether its gradients are scaled, unscaled again, or stepped with at this scale.
        attempts: Steps that were made or skipped.
        inside: Makes the real step, while a scaler decides whether to (fp16), or an engine calls it.
        model: The model inside a DeepSpeed engine that it steps, weakly; None: there is no engine.
    """

    consumed: bool = False
    skipped: bool = False
    phase: Literal["scaled", "unscaled", "stepped"] = "scaled"
    attempts: int = 0
    inside: Any = None
    model: Any = None


@dataclass
class State:
    """A training in this process.

    Attributes:
        plan: How things are made distributed.
        device: Where this rank computes.
        models: Prepared models, in the order in which they were prepared.
        optimizers: Prepared optimizers.
        schedulers: Prepared learning-rate schedulers.
        loaders: Prepared loaders.
        registered: Further objects with state_dict and load_state_dict that checkpoints keep.
        scaler: Scales the loss under fp16; None otherwise.
        micro_step: Micro-batches since the last optimizer step.
        steps: Optimizer steps that were made; of the optimizer prepared last, if there are several.
        skipped_steps: Optimizer steps that were not made because a gradient was no number (fp16).
        sync_gradients: Whether the micro-batch at hand ends with an optimizer step.
        trigger: Whether this rank has called `set_trigger`.
        window: Micro-batches for the optimizer step at hand, by which losses are divided.
        correction: What gradients are still to be multiplied by, if the window turned out to be shorter.
        backward_made: Whether `backward` was called in the micro-batch at hand.
        loss_scaled: Whether a loss was scaled since the scale was last renewed (fp16).
        active: The loaders that are being iterated over, the innermost last.
        joining: Whether `join_uneven_inputs` lets ranks have different numbers of batches.
        mesh: The ranks as FSDP and HSDP see them, made on first use.
        mesh_of_sequences: The same with those that divide sequences as a dimension, if the plan has `cp`.
        mesh_of_experts: The same with those that divide experts as a dimension, if the plan has `ep`.
        stages: What is known of stages, if the plan has `pp` and a model was prepared.
        records: What is known of each optimizer.
        sharded_parts: FSDP's modules in each sharded model.
        replaced: The parameters that now stand for those a model had before it was prepared.
        averages: The averaged weights of each parameter that an optimizer has stepped, if the plan has `ema`.
        averaged: Models that hold their averaged weights at the moment.
        saved_in: The folder of the last checkpoint that this process took part in; empty: there is none.
        neighbor_copies: What `replicate` keeps.
        copies: The tensors of the last asynchronous save, in CPU memory that the next one uses again.
        begun: Whether something was prepared, which it may have outlived.
    """

    plan: Plan
    device: torch.device
    models: MutableSequence[nn.Module] = field(default_factory=list)
    optimizers: MutableSequence[torch.optim.Optimizer] = field(default_factory=list)
    schedulers: MutableSequence[Any] = field(default_factory=list)
    loaders: MutableSequence[Any] = field(default_factory=list)
    registered: list[Any] = field(default_factory=list)
    scaler: Any = None
    micro_step: int = 0
    steps: int = 0
    skipped_steps: int = 0
    sync_gradients: bool = True
    trigger: bool = False
    window: int = 1
    correction: float = 1.0
    backward_made: bool = False
    loss_scaled: bool = False
    active: MutableSequence[Any] = field(default_factory=list)
    joining: bool = False
    mesh: Any = None
    mesh_of_sequences: Any = None
    mesh_of_experts: Any = None
    stages: Any = None
    records: Any = field(default_factory=weakref.WeakKeyDictionary)
    sharded_parts: Any = field(default_factory=weakref.WeakKeyDictionary)
    replaced: Any = field(default_factory=WeakIdKeyDictionary)
    averages: Any = field(default_factory=WeakIdKeyDictionary)
    averaged: list[nn.Module] = field(default_factory=list)
    saved_in: str = ""
    neighbor_copies: Any = None
    copies: dict[str, torch.Tensor] = field(default_factory=dict)
    begun: bool = False

    def __post_init__(self) -> None:
        self.models, self.optimizers = Living(self.models), Living(self.optimizers)
        self.schedulers, self.loaders = Living(self.schedulers), Living(self.loaders)
        self.active = Living(self.active)

    @property
    def loader(self) -> Any:
        """The prepared loader that is being iterated over, the innermost; None outside of loops."""
        return self.active[-1] if self.active else None

    def enter_loader(self, loader: Any) -> None:
        """Note that a loop over this prepared loader begins."""
        before_loop()
        self.leave_loader(loader)
        self.active.append(loader)

    def leave_loader(self, loader: Any) -> None:
        """Note that the loop over this prepared loader has ended, or was left."""
        self.active = Living(other for other in self.active if other is not loader)

    def abandon_window(self) -> None:
        """Forget the micro-batches since the last step: the next is the first of a window, on all ranks alike.

        Gradients are left to the caller.
        """
        self.micro_step, self.window, self.correction = 0, 1, 1.0
        self.sync_gradients, self.backward_made, self.loss_scaled = True, False, False
        for record in self.records.values():
            record.consumed, record.phase, record.inside = False, "scaled", None

    def add_model(self, model: nn.Module) -> None:
        """Add a prepared model. It may replace an earlier one, once the caller has assigned it."""
        global _replaced_before_loop, _replaced_in_cell
        _replaced_before_loop = _replaced_in_cell = bool(_prepared)
        _prepared.add(model)
        self.models.append(model)

    def tidy(self) -> None:
        """Let go of models that nobody can reach any more, but that refer to themselves."""
        if self.models:
            gc.collect()


_current: State | None = None
_prepared: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # of all states
_replaced_before_loop = False  # whether models may have been replaced since the last loop began
_replaced_in_cell = False


def before_loop() -> None:
    """Free the models that a `prepare` before this loop has replaced: they refer to themselves."""
    global _replaced_before_loop
    if _replaced_before_loop:
        _replaced_before_loop = False
        gc.collect()


def after_cell() -> None:
    """Free the models that a `prepare` in this cell has replaced, and give their memory back to the system."""
    global _replaced_in_cell
    if _replaced_in_cell:
        _replaced_in_cell = False
        gc.collect()
        trim_malloc()


def current() -> State:
    """Return the current state; on first use one is made by the plan in the environment."""
    global _current
    if _current is None:
        _current = State(Plan.from_environment(), default_device())
    return _current


def is_begun() -> bool:
    """Return whether something is prepared in the current state."""
    return _current is not None and bool(_current.models or _current.optimizers or _current.loaders)


def begin(plan: Plan) -> State:
    """Make a new state the current one. It has what was registered before anything was prepared."""
    global _current
    _current = State(plan, default_device(), registered=_registered_early(), begun=True)
    return _current


def follow_plan() -> None:
    """Have what is prepared next follow the plan in the environment. Only to be called before anything is prepared."""
    global _current
    early = _registered_early()
    _current = None
    if early:
        current().registered = early


def _registered_early() -> list[Any]:
    return [] if _current is None or _current.begun else list(_current.registered)


def replace(state: State | None) -> State | None:
    """Make another state the current one, None: one that is yet to be made. Returns the one that was."""
    global _current
    before, _current = _current, state
    return before


def forget() -> None:
    """Let go of all that has been prepared."""
    global _current
    _current = None


def abandon_window() -> None:
    """Forget the micro-batches since the last step, if a state is there: after an interrupt, on all ranks."""
    if _current is not None:
        _current.abandon_window()


def resized() -> list[str]:
    """Have what is prepared be of the ranks that there are now, if a state is there. Gradients are left to the caller.

    Returns:
        What can't be, with what to do.
    """
    if _current is None:
        return []
    _current.mesh = _current.mesh_of_sequences = _current.mesh_of_experts = _current.neighbor_copies = None
    return [note for loader in _current.loaders if (note := loader.take_share(data_rank(), data_size()))]


def default_device() -> torch.device:
    """Return the device of this rank: its GPU if torch has chosen one, else the one of its local rank, else the CPU."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    chosen, local = torch.cuda.current_device(), int(os.environ.get("LOCAL_RANK", "0"))
    unchosen = chosen == 0 and 0 < local < torch.cuda.device_count()
    return torch.device("cuda", local if unchosen else chosen)


def world_size() -> int:
    """Number of ranks; 1 without a process group."""
    return dist.get_world_size() if has_group() else 1


def rank() -> int:
    """Return this process's rank; 0 without a process group."""
    return dist.get_rank() if has_group() else 0


def data_size() -> int:
    """Return the number of different batches at a time: ranks that divide layers, sequences or models share theirs."""
    neighbors, stages = _sharers()
    return world_size() // (neighbors * stages)


def data_rank() -> int:
    """Return which of these batches is this rank's."""
    neighbors, stages = _sharers()
    return rank() % (world_size() // stages) // neighbors


def batch_ranks() -> list[list[int]]:
    """Return the ranks that share each batch."""
    if _current is None:
        return [[each] for each in range(world_size())]
    return sharing.batch_ranks(_current.plan, world_size())


def _sharers() -> tuple[int, int]:
    return (1, 1) if _current is None else sharing.sharers(_current.plan, world_size())


def has_group() -> bool:
    """Return whether there is a process group."""
    return dist.is_available() and dist.is_initialized()


active_training.training = active_training.Training(after_cell, abandon_window, is_begun, replace, follow_plan, resized)
