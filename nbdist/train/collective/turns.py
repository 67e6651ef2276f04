"""Who does what, and in which order: the main process, turns, shares of inputs, a flag that any rank can raise.

Independent of models.
"""

from __future__ import annotations

import builtins
import functools
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ParamSpec, TypeVar

import torch
import torch.distributed as dist

from nbdist.errors import UsageError
from nbdist.train import state as training
from nbdist.train.collective import collectives
from nbdist.train.collective.nested import map_mapping
from nbdist.train.collective.participants import refuse_partial
from nbdist.train.collective.process_group import ensure_group

P = ParamSpec("P")
R = TypeVar("R")


class Flag:
    """A function of no arguments, of a module, that also has the truth value of its answer: `if flag:`, `if flag():`.

    A function alone would be true wherever its parentheses are forgotten.

    Args:
        ask: Gives the answer. Used as a decorator.
    """

    def __init__(self, ask: Callable[[], bool]) -> None:
        functools.update_wrapper(self, ask)
        self._ask = ask

    def __call__(self) -> bool:
        """Return the answer."""
        return self._ask()

    def __bool__(self) -> bool:
        return self._ask()

    def __eq__(self, other: object) -> bool:
        return self is other if isinstance(other, Flag) else self._ask() == other

    def __hash__(self) -> int:
        return hash(self._ask)

    def __repr__(self) -> str:
        return repr(self._ask())

    def __reduce__(self) -> str:
        return self._ask.__qualname__  # it is the module's one: asked where it arrives


@Flag
def is_main_process() -> bool:
    """Return whether this is rank 0. Without parentheses, too: `if nbdist.is_main_process:`."""
    return _rank() == 0


@Flag
def is_local_main_process() -> bool:
    """Return whether this is the first rank of its node. Without parentheses, too."""
    return local_rank() == 0


@Flag
def is_last_process() -> bool:
    """Return whether this is the rank with the highest number. Without parentheses, too."""
    ensure_group()
    return _rank() == training.world_size() - 1


def _rank() -> int:
    ensure_group()
    return training.rank()


def local_rank() -> int:
    """Return this process's rank on its node."""
    rank = _rank()
    return int(os.environ.get("LOCAL_RANK", rank)) if training.world_size() > 1 else 0


def on_main_process(function: Callable[P, R]) -> Callable[P, R | None]:
    """Let a function run on rank 0 only; elsewhere it does nothing and returns None."""
    return _where(is_main_process, function)


def on_local_main_process(function: Callable[P, R]) -> Callable[P, R | None]:
    """Let a function run on the first rank of each node only; elsewhere it does nothing and returns None."""
    return _where(is_local_main_process, function)


def on_process(function: Callable[..., Any] | None = None, process_index: int = 0) -> Any:
    """Let a function run on one rank only; elsewhere it does nothing and returns None.

    >>> @nbdist.on_process(process_index=2)
    ... def show(): ...
    """
    if function is None:
        return functools.partial(on_process, process_index=process_index)
    return _where(lambda: _rank() == process_index, function)


def _where(is_here: Callable[[], bool], function: Callable[P, R]) -> Callable[P, R | None]:
    @functools.wraps(function)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> R | None:
        return function(*args, **kwargs) if is_here() else None

    return wrapped


def save(
    thing: Any, path: str | os.PathLike[str], save_on_each_node: bool = False, safe_serialization: bool = False
) -> None:
    """Save an object on rank 0 only, by `torch.save`. May be called on any rank.

    Args:
        thing: Anything that can be pickled; a dict of whole tensors with `safe_serialization`.
        path: The file.
        save_on_each_node: Whether the first rank of each node saves, where nodes share no file system.
        safe_serialization: Whether it is written as safetensors, which need no trust to be read.
    """
    if not (is_local_main_process() if save_on_each_node else is_main_process()):
        return
    if safe_serialization:
        from safetensors.torch import save_file

        save_file({name: tensor.contiguous() for name, tensor in thing.items()}, path)
    else:
        torch.save(thing, path)


def print(*args: Any, **kwargs: Any) -> None:
    """Print like Python's `print`, on rank 0 only."""
    if is_main_process():
        builtins.print(*args, **kwargs)


def wait_for_everyone() -> None:
    """Wait until all ranks have come here."""
    ensure_group()
    if training.world_size() == 1:
        return
    refuse_partial("wait_for_everyone", training.world_size())
    device = training.default_device()
    if device.type == "cuda" and dist.get_backend() == "nccl":
        dist.barrier(device_ids=[device.index])
    else:
        dist.barrier()


@contextmanager
def main_process_first() -> Iterator[None]:
    """Rank 0 runs what is inside first, then all others: as where a download is to be made once."""
    with _first("main_process_first", is_main_process()):
        yield


@contextmanager
def local_main_process_first() -> Iterator[None]:
    """Run the body on the first rank of each node, then on the node's other ranks."""
    with _first("local_main_process_first", is_local_main_process()):
        yield


@contextmanager
def _first(function: str, mine: bool) -> Iterator[None]:
    refuse_partial(function, training.world_size())
    if not mine:
        wait_for_everyone()
    try:
        yield
    finally:
        if mine:  # also where it has raised: the others must not wait forever
            wait_for_everyone()


@contextmanager
def split_between_processes(inputs: Any, apply_padding: bool = False) -> Iterator[Any]:
    """Give this rank its share of the inputs: each rank as many, the first ones one more where that does not divide.

    Args:
        inputs: A list, tuple, string, tensor, NumPy array or `datasets.Dataset`; or a dict of such, all as long.
        apply_padding: Whether shares are filled up with the last item, so that all are as long.

    Raises:
        UsageError: A dict's values are not all as long, or the inputs have no length.
    """
    ensure_group()
    yield _share(inputs, apply_padding)


def _share(inputs: Any, apply_padding: bool) -> Any:
    if isinstance(inputs, Mapping):
        lengths = {key: _length(item) for key, item in inputs.items()}
        if len(set(lengths.values())) > 1:
            raise UsageError(f"split_between_processes takes a dict of values of equal length, not {lengths}")
        return map_mapping(lambda item: _share(item, apply_padding), inputs)
    number, rank, ranks = _length(inputs), training.rank(), training.world_size()
    each, more = divmod(number, ranks)
    start = rank * each + min(rank, more)
    stop = start + each + (rank < more)
    missing = each + bool(more) - (stop - start) if apply_padding and number else 0
    chosen = [*range(start, stop), *[number - 1] * missing]
    if not isinstance(inputs, torch.Tensor) and callable(getattr(inputs, "select", None)):
        return inputs.select(chosen)  # a datasets.Dataset, whose slices are dicts
    if not missing:
        return inputs[start:stop]
    plain = isinstance(inputs, list | tuple | str | bytes)
    return inputs[start:stop] + inputs[-1:] * missing if plain else inputs[chosen]


def _length(inputs: Any) -> int:
    try:
        return len(inputs)
    except TypeError:
        raise UsageError(
            f"split_between_processes takes lists, tuples, tensors or dicts of them, not {type(inputs).__name__}"
        ) from None


def set_trigger() -> None:
    """Raise a flag on this rank that `check_trigger` shows to all: as to stop early, or to save now."""
    training.current().trigger = True


def check_trigger() -> bool:
    """Return whether a rank called `set_trigger` since the last check, and reset it. Call it on all ranks."""
    state = training.current()
    raised = bool(collectives.reduce(torch.tensor(state.trigger), "sum"))
    if raised:
        state.trigger = False
    return raised
