"""Blocks without the cache of keys and values that language models make by default, which training has no use for.

A block that is computed again in backward must not get one: its cache is filled already then. Knows the method by which
transformers' caches give their length, the flag `use_cache`, and nothing else of its models.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

from torch import nn

_FLAG = "use_cache"
_READ_ONLY = "_can_checkpoint_with_cache"  # set by transformers on layers that read the cache of other layers


@dataclass(frozen=True)
class CacheArguments:
    """How a block takes its cache.

    Attributes:
        layer: The block's place in the cache.
        flag: The position of `use_cache` among the arguments, or None.
        is_writer: Whether the block writes into the cache.
    """

    layer: int
    flag: int | None
    is_writer: bool

    @classmethod
    def of(cls, block: nn.Module) -> CacheArguments:
        """Return how this block's forward takes it."""
        names = list(inspect.signature(type(block).forward).parameters)[1:]
        numbered = (getattr(part, "layer_idx", None) for part in block.modules())
        layer = next((number for number in numbered if isinstance(number, int)), 0)
        return cls(layer, names.index(_FLAG) if _FLAG in names else None, not getattr(block, _READ_ONLY, False))

    def is_filled(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Return whether the block is given keys and values of earlier tokens, on which its result depends."""
        caches = [value for value in (*args, *kwargs.values()) if _is_cache(value)]
        return self.is_writer and any(cache.get_seq_length(self.layer) for cache in caches)

    def turned_off(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the same arguments without a cache to write into."""
        if not self.is_writer:
            return args, kwargs
        kept = tuple(_off(value, place == self.flag) for place, value in enumerate(args))
        return kept, {name: _off(value, name == _FLAG) for name, value in kwargs.items()}


def _is_cache(value: Any) -> bool:
    """Return whether it works like one. The argument's name says little: it changes, and a block may mean another."""
    return callable(getattr(value, "get_seq_length", None))


def _off(value: Any, is_flag: bool) -> Any:
    if is_flag:
        return False
    return None if _is_cache(value) else value
