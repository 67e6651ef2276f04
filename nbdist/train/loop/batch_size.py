"""Memory given back, and batches made smaller until they fit.

Independent of strategies.
"""

from __future__ import annotations

import functools
import gc
import inspect
from collections.abc import Callable
from typing import Any

import torch

from nbdist.errors import UsageError
from nbdist.metrics.allocation.oom import is_out_of_memory
from nbdist.train import state as training
from nbdist.train.collective import collectives
from nbdist.train.loop.loop import give_up_window


def free_memory(*objects: Any) -> list[None]:
    """Let go of all that was prepared or registered, and give unused memory back to the device.

    >>> model, optimizer = nbdist.free_memory(model, optimizer)

    Args:
        objects: Only counted: what the caller still holds can't be freed.

    Returns:
        None for each object, to be assigned to the names that held them.
    """
    training.forget()
    _collect()
    return [None] * len(objects)


def _collect() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def find_executable_batch_size(
    function: Callable[..., Any] | None = None,
    starting_batch_size: int = 128,
    reduce_batch_size_fn: Callable[[int], int] | None = None,
) -> Any:
    """Return a decorator: call a function with a batch size, and with smaller ones as long as memory is short.

    >>> @nbdist.find_executable_batch_size(starting_batch_size=512)
    ... def train(batch_size): ...
    >>> train()

    After each try ranks tell each other whether memory was short on one, so that all go on with the same size. A rank
    whose memory is short in the middle of an exchange with the others leaves them waiting: as with any error there,
    their part ends when the exchange does.

    Args:
        function: Its first argument is the batch size, in samples; the caller leaves it out.
        starting_batch_size: The first size that is tried.
        reduce_batch_size_fn: Gives the next size for one that did not fit; nine tenths of it by default.

    Raises:
        UsageError: No batch size is left, the next one is not smaller, the function takes none, or the caller has
            given one.
    """
    if function is None:
        return functools.partial(
            find_executable_batch_size,
            starting_batch_size=starting_batch_size,
            reduce_batch_size_fn=reduce_batch_size_fn,
        )
    smaller = reduce_batch_size_fn or (lambda size: int(size * 0.9))
    _refuse_without_batch_size(function)

    @functools.wraps(function)
    def decorated(*args: Any, **kwargs: Any) -> Any:
        _refuse_other_arguments(function, args, kwargs)
        size = starting_batch_size
        while size > 0:
            fits, result = _attempt(function, size, args, kwargs)
            if fits:
                return result
            give_up_window(training.current())  # ranks may have stopped in different micro-batches
            _collect()
            before, size = size, smaller(size)
            if size >= before:
                raise UsageError(
                    f"reduce_batch_size_fn gave {size} for {before}, which did not fit: let it return a smaller one, "
                    "for example lambda size: size // 2"
                )
        raise UsageError(f"not even a batch of 1 fits into memory, starting from {starting_batch_size}")

    return decorated


def _refuse_without_batch_size(function: Callable[..., Any]) -> None:
    names = list(inspect.signature(function).parameters)
    if not names:
        name = getattr(function, "__name__", "it")
        raise UsageError(f"{name} takes no argument: its first is to be the batch size, as in def {name}(batch_size)")


def _refuse_other_arguments(function: Callable[..., Any], args: Any, kwargs: Any) -> None:
    try:
        inspect.signature(function).bind(0, *args, **kwargs)
    except TypeError as error:
        raise UsageError(
            f"{getattr(function, '__name__', 'the function')} can't be called like this ({error}): its first "
            "argument, the batch size, is given by find_executable_batch_size, so leave it out"
        ) from None


def _attempt(function: Callable[..., Any], size: int, args: Any, kwargs: Any) -> tuple[bool, Any]:
    result, short = None, False
    try:
        result = function(size, *args, **kwargs)
    except Exception as error:  # the function is the user's; only one kind is for us
        if not is_out_of_memory(error):
            raise
        short = True
    anywhere = bool(collectives.reduce(torch.tensor(short), "sum"))
    return not anywhere, result
