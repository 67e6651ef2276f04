"""Sees the batches that torch's DataLoaders give, and how long the loop waits for each.

Other sources of batches are not seen.
"""

from __future__ import annotations

import functools
import hashlib
import time
import weakref
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.utils.data.dataloader as dataloader

from nbdist.metrics.compute.listening import WrappedFunction

Listener = Callable[["float | None", Any], None]

_TENSORS = 16  # of a batch that are looked at
_VALUES = 1024  # of a tensor that are looked at, about


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


class LoaderKey(NamedTuple):
    """What tells DataLoaders apart, without keeping anything of one alive.

    Attributes:
        dataset: Its address.
        collate: That of what makes a batch of items.
        workers: Processes that read.
        batch_size: Items of a batch; 0: not known.
    """

    dataset: int
    collate: int
    workers: int
    batch_size: int


class LoaderUse:
    """What a loop has taken from one DataLoader.

    Attributes:
        batches: How many.
        seconds: Waited for them.
    """

    def __init__(self) -> None:
        self.batches = 0
        self.seconds = 0.0


class LoaderUses:
    """The DataLoaders that a loop takes its batches from."""

    def __init__(self) -> None:
        self.used: dict[LoaderKey, LoaderUse] = {}
        self._iterator: weakref.ref[Any] = weakref.ref(self)
        self._use = LoaderUse()

    def ask(self, iterator: Any) -> None:
        """Note who is asked for a batch."""
        if self._iterator() is not iterator:
            self._iterator = weakref.ref(iterator)
            self._use = self.used.setdefault(loader_key(iterator), LoaderUse())

    def take(self, seconds: float) -> None:
        """Note that it has arrived after so many seconds of waiting."""
        self._use.batches += 1
        self._use.seconds += seconds


def loader_key(iterator: Any) -> LoaderKey:
    """Return which DataLoader an iterator is of."""
    size = getattr(getattr(iterator, "_index_sampler", None), "batch_size", None)
    dataset, collate = getattr(iterator, "_dataset", None), getattr(iterator, "_collate_fn", None)
    return LoaderKey(
        id(dataset), id(collate), getattr(iterator, "_num_workers", 0), size if isinstance(size, int) else 0
    )


def describe(batch: Any) -> Batch:
    """Return what a batch looks like, from its shapes."""
    tensors = [tensor for _, tensor in zip(range(_TENSORS), _tensors(batch), strict=False)]
    shapes = tuple(tuple(tensor.shape) for tensor in tensors)
    if not shapes or not shapes[0]:
        return Batch(shapes, 0, "")
    words = len(shapes[0]) == 2 and not any(tensor.is_floating_point() for tensor in tensors)
    return Batch(shapes, tensors[0].numel(), "tokens") if words else Batch(shapes, shapes[0][0], "samples")


def fingerprint(batch: Any) -> str:
    """Return what stands for the values of a batch in the host's memory; empty for another one.

    A few of each tensor's values, from all over it, decide. Takes some 50 µs.
    """
    digest = hashlib.blake2b(digest_size=8)
    tensors = [tensor for _, tensor in zip(range(_TENSORS), _tensors(batch), strict=False)]
    if not tensors or any(tensor.device.type != "cpu" or tensor.layout != torch.strided for tensor in tensors):
        return ""
    for tensor in tensors:
        values = tensor.detach().reshape(-1)
        values = values[:: max(1, values.numel() // _VALUES)].contiguous()
        digest.update(repr((tuple(tensor.shape), values.dtype)).encode() + bytes(values.view(torch.uint8).numpy()))
    return digest.hexdigest()


def _tensors(value: Any, depth: int = 2) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif depth and isinstance(value, (Mapping, tuple, list)):
        for part in value.values() if isinstance(value, Mapping) else value:
            yield from _tensors(part, depth - 1)


def _wrap(original: Callable[[Any], Any], listeners: Callable[[], Sequence[Listener]]) -> Callable[[Any], Any]:
    @functools.wraps(original)
    def next_batch(iterator: Any) -> Any:
        for listener in listeners():
            listener(None, iterator)
        began = time.perf_counter()
        batch = original(iterator)
        seconds = time.perf_counter() - began
        for listener in listeners():
            listener(seconds, batch)
        return batch

    return next_batch


_iterators = WrappedFunction(getattr(dataloader, "_BaseDataLoaderIter", None), "__next__", _wrap)
# Before each batch with None and the iterator that is asked for it, after it with the seconds waited and the batch.
listen = _iterators.listen
