"""Blocks without the cache of keys and values that language models make by default, which training has no use for.

A block that is computed again in backward must not get one: its cache is filled already then. Knows the argument names
of transformers' models and nothing else of them.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

from torch import nn

_CACHES = ("cache", "past_key_values", "past_key_value", "layer_past")  # the first from transformers 5.24 on
_OFF: dict[str, Any] = {**dict.fromkeys(_CACHES), "use_cache": False}
_READ_ONLY = "_can_checkpoint_with_cache"  # set by transformers on layers that read the cache of other layers


@dataclass(frozen=True)
class CacheArguments:
    """Where a block takes its cache.

    Attributes:
        layer: The block's place in the cache.
        places: The position of each argument that turns caching on, by name.
        is_writer: Whether the block writes into the cache.
    """

    layer: int
    places: dict[str, int]
    is_writer: bool

    @classmethod
    def of(cls, block: nn.Module) -> CacheArguments:
        """Return the arguments of this block's forward."""
        names = list(inspect.signature(type(block).forward).parameters)[1:]
        numbered = (getattr(part, "layer_idx", None) for part in block.modules())
        layer = next((number for number in numbered if isinstance(number, int)), 0)
        places = {name: position for position, name in enumerate(names) if name in _OFF}
        return cls(layer, places, not getattr(block, _READ_ONLY, False))

    def is_filled(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Return whether the block is given keys and values of earlier tokens, on which its result depends."""
        caches = [kwargs.get(name) for name in _CACHES]
        caches += [args[self.places[name]] for name in _CACHES if self.places.get(name, len(args)) < len(args)]
        return self.is_writer and any(cache is not None and self._length(cache) for cache in caches)

    def turned_off(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the same arguments without a cache to write into."""
        if not self.is_writer:
            return args, kwargs
        off = {position: _OFF[name] for name, position in self.places.items()}
        kept = tuple(off.get(position, value) for position, value in enumerate(args))
        return kept, {name: _OFF.get(name, value) for name, value in kwargs.items()}

    def _length(self, cache: Any) -> int:
        length = getattr(cache, "get_seq_length", None)
        return int(length(self.layer)) if length is not None else 1
