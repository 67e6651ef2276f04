"""What is inside nested lists, tuples and dicts, and inside the containers that torch has been told of.

Torch's own module for that is private: without it, containers other than these are taken as they are.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any


def leaves(tree: Any) -> list[Any]:
    """Return all that is inside, in a fixed order."""
    found: list[Any] = getattr(_of_torch(), "tree_leaves", _plain_leaves)(tree)
    return found


def mapped(function: Callable[[Any], Any], tree: Any) -> Any:
    """Return the same containers with `function(leaf)` in place of each leaf."""
    return getattr(_of_torch(), "tree_map", _plain_map)(function, tree)


@functools.cache
def _of_torch() -> Any:
    """Return torch's module, which is loaded at the first use: a notebook without ranks need not load torch."""
    try:
        return importlib.import_module("torch.utils._pytree")
    except ImportError:
        return None


def _plain_leaves(tree: Any) -> list[Any]:
    if isinstance(tree, dict):
        tree = list(tree.values())
    if isinstance(tree, list | tuple):
        return [leaf for part in tree for leaf in _plain_leaves(part)]
    return [tree]


def _plain_map(function: Callable[[Any], Any], tree: Any) -> Any:
    if isinstance(tree, dict):
        return {key: _plain_map(function, part) for key, part in tree.items()}
    if isinstance(tree, list | tuple):
        parts = [_plain_map(function, part) for part in tree]
        return type(tree)(*parts) if hasattr(tree, "_fields") else type(tree)(parts)
    return function(tree)
