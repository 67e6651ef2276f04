"""Sees the batches that torch's DataLoaders give, and how long the loop waits for each.

Owns the wrapper around their iterators, as long as anybody listens. Other sources of batches are not seen.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils.data.dataloader as dataloader

Listener = Callable[[float, Any], None]

_NAME = "_BaseDataLoaderIter"  # private, so it is looked for when it is used
_TENSORS = 16  # of a batch that are looked at

_listeners: list[Listener] = []
_original: Callable[[Any], Any] | None = None


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


def listen(listener: Listener) -> Callable[[], None]:
    """Call this with the seconds waited and the batch, after each batch.

    Returns:
        What ends it.
    """
    heard = torch.compiler.disable(listener)  # in a compiled region it would be compiled as well
    _listeners.append(heard)
    _install()

    def stop() -> None:
        if heard in _listeners:
            _listeners.remove(heard)
        if not _listeners:
            _uninstall()

    return stop


def describe(batch: Any) -> Batch:
    """What a batch looks like, from its shapes."""
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


def _install() -> None:
    global _original
    kind = getattr(dataloader, _NAME, None)
    if _original is not None or kind is None:
        return
    _original = original = kind.__next__

    @functools.wraps(original)
    def next_batch(iterator: Any) -> Any:
        began = time.perf_counter()
        batch = original(iterator)
        seconds = time.perf_counter() - began
        for listener in list(_listeners):
            listener(seconds, batch)
        return batch

    next_batch._torchdynamo_disable = True  # type: ignore[attr-defined]  # not to be compiled with users' code
    kind.__next__ = next_batch


def _uninstall() -> None:
    """Take the wrapper off, unless somebody has wrapped it in turn; then it stays, and does nothing."""
    global _original
    kind = getattr(dataloader, _NAME, None)
    if kind is not None and getattr(kind.__next__, "__wrapped__", None) is _original:
        kind.__next__ = _original
        _original = None
