"""Tensors inside lists, tuples and dicts: taken out, and put back.

Knows nothing of ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from nbdist.errors import UsageError


def tensors_in(data: Any, function: str) -> list[tuple[str, torch.Tensor]]:
    """Return all tensors with where they stand, such as "['logits'][0]", in a fixed order.

    Args:
        data: A tensor, or lists, tuples and dicts of them.
        function: What the user has called, for the message.

    Raises:
        UsageError: There is something else in it.
    """
    return list(_walk(data, function, ""))


def _walk(data: Any, function: str, place: str) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(data, torch.Tensor):
        yield place, data
    elif isinstance(data, list | tuple):
        for index, item in enumerate(data):
            yield from _walk(item, function, f"{place}[{index}]")
    elif isinstance(data, Mapping):
        for key, item in data.items():
            yield from _walk(item, function, f"{place}[{key!r}]")
    else:
        where = f", and {place} is {_a(data)}" if place else f", not {_a(data)}"
        raise UsageError(
            f"{function} takes tensors, or lists, tuples and dicts of them{where}: "
            "make it a tensor, or use gather_object, broadcast_object_list"
        )


def _a(data: Any) -> str:
    return "None" if data is None else f"of type {type(data).__name__}"


def rebuilt(data: Any, tensors: Iterator[torch.Tensor]) -> Any:
    """Return the same lists, tuples and dicts around other tensors, in the order of `tensors_in`."""
    if isinstance(data, torch.Tensor):
        return next(tensors)
    return with_items(data, lambda item: rebuilt(item, tensors))


def with_items(data: Any, change: Callable[[Any], Any]) -> Any:
    """Return a list, tuple or dict of the same type with each item changed."""
    if isinstance(data, Mapping):
        return type(data)({key: change(item) for key, item in data.items()})  # type: ignore[call-arg]
    if hasattr(data, "_fields"):
        return type(data)(*map(change, data))
    return type(data)(map(change, data))
