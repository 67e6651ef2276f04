"""Tensors inside lists, tuples, dicts and the other structures that batches are: taken out, put back, replaced.

Independent of ranks, devices or loaders.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping, MutableMapping
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
    """Return the same structure around other tensors, in the order of `tensors_in`."""
    return map_tensors(lambda _: next(tensors), data)


def is_tensor(value: Any) -> bool:
    """Return whether it is a tensor, for `map_tensors`."""
    return isinstance(value, torch.Tensor)


def map_tensors(function: Callable[[Any], Any], value: Any, is_leaf: Callable[[Any], bool] = is_tensor) -> Any:
    """Return the same structure with each tensor replaced by `function(tensor)`.

    Looked into are lists, tuples, named tuples, mappings and dataclasses, of which the types stay; all else is kept.

    Args:
        function: Called with each tensor.
        value: The structure.
        is_leaf: Tells what is replaced, if not tensors.
    """

    def within(item: Any) -> Any:
        return map_tensors(function, item, is_leaf)

    if is_leaf(value):
        return function(value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*map(within, value))
    if isinstance(value, list | tuple):
        return type(value)(map(within, value))
    if isinstance(value, Mapping):
        return map_mapping(within, value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in dataclasses.fields(value) if field.init]
        return dataclasses.replace(value, **{name: within(getattr(value, name)) for name in names})
    return value


def map_mapping(within: Callable[[Any], Any], value: Mapping[Any, Any]) -> Any:
    """Return a mapping of the same type with each item changed."""
    items = {key: within(item) for key, item in value.items()}
    if not isinstance(value, MutableMapping):
        return type(value)(items)  # type: ignore[call-arg]
    changed = copy.copy(value)  # keeps what a defaultdict or the output of a tokenizer has beside its items
    for key, item in items.items():
        changed[key] = item
    return changed
