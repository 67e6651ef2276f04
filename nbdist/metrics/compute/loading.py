"""Sees the batches that torch's DataLoaders give, and how long the loop waits for each.

Other sources of batches are not seen.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils.data.dataloader as dataloader

from nbdist.metrics.compute.listening import WrappedFunction

Listener = Callable[["float | None", Any], None]

_TENSORS = 16  # of a batch that are looked at


@dataclass(frozen=True)
class Batch:
    """What a batch looks like.

    Attributes:
        shapes: Of its tensors; equal for batches that take the same work.
        units: How much it holds.
        unit: "tokens" if it is a matrix of integers with nothing but integers beside it, else "samples"; "": unknown.
    """

    shapes: Hashable
    units: int
    unit: str


def describe(batch: Any) -> Batch:
    """Return what a batch looks like, from its shapes."""
    tensors = [tensor for _, tensor in zip(range(_TENSORS), _tensors(batch), strict=False)]
    shapes = tuple(tuple(tensor.shape) for tensor in tensors)
    if not shapes or not shapes[0]:
        return Batch(shapes, 0, "")
    words = len(shapes[0]) == 2 and not any(tensor.is_floating_point() for tensor in tensors)
    return Batch(shapes, tensors[0].numel(), "tokens") if words else Batch(shapes, shapes[0][0], "samples")


def _tensors(value: Any, depth: int = 2) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif depth and isinstance(value, (Mapping, tuple, list)):
        for part in value.values() if isinstance(value, Mapping) else value:
            yield from _tensors(part, depth - 1)


def _wrap(original: Callable[[Any], Any], listeners: Callable[[], list[Listener]]) -> Callable[[Any], Any]:
    @functools.wraps(original)
    def next_batch(iterator: Any) -> Any:
        for listener in listeners():
            listener(None, None)
        began = time.perf_counter()
        batch = original(iterator)
        seconds = time.perf_counter() - began
        for listener in listeners():
            listener(seconds, batch)
        return batch

    return next_batch


_iterators = WrappedFunction(getattr(dataloader, "_BaseDataLoaderIter", None), "__next__", _wrap)
listen = _iterators.listen  # before each batch with None, and after it with the seconds waited and the batch
