"""Tensors inside of the structures that batches are. Knows no ranks, devices or loaders."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any

import torch


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
        return _map_mapping(within, value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in dataclasses.fields(value) if field.init]
        return dataclasses.replace(value, **{name: within(getattr(value, name)) for name in names})
    return value


def _map_mapping(within: Callable[[Any], Any], value: Mapping[Any, Any]) -> Any:
    items = {key: within(item) for key, item in value.items()}
    if not isinstance(value, MutableMapping):
        return type(value)(items)  # type: ignore[call-arg]
    changed = copy.copy(value)  # keeps what a defaultdict or the output of a tokenizer has beside its items
    for key, item in items.items():
        changed[key] = item
    return changed
