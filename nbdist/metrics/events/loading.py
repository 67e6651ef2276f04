"""Sees the batches that torch's DataLoaders give, and how long the loop waits for each.

Other sources of batches are not seen.
"""

from __future__ import annotations

import functools
import hashlib
import time
import weakref
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.utils.data.dataloader as dataloader

from nbdist.metrics.events import passes
from nbdist.metrics.events.listening import WrappedFunction
from nbdist.metrics.events.loader_source import KeptSources, SourceReference

Listener = Callable[["float | None", Any], None]

_AHEAD = 1  # batches that a loop may have fetched before it works on them, as to know which one is the last
_KEPT = 4096  # batches that no step follows, as when a model is only evaluated
_WORTH_KEEPING = 0.05  # seconds waited for a DataLoader in all, from which on there may be advice on it
_NONE: frozenset[Hashable] = frozenset()
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


class TakenBatch:
    """A batch that no step has worked on yet.

    Attributes:
        units: How much it holds.
        began: Nodes that autograd had made when it was taken.
        ended: The same, when the next batch was; None: it is the newest.
        is_used: Whether a backward pass has differentiated what was computed in between, as far as is known.
    """

    def __init__(self, units: int, began: int) -> None:
        self.units, self.began = units, began
        self.ended: int | None = None
        self.is_used = False

    @property
    def is_stray(self) -> bool:
        """Whether something was computed with gradients then, and nothing of it differentiated."""
        return not self.is_used and self.ended is not None and self.ended > self.began


class LoaderUse:
    """What a loop has taken from one DataLoader.

    Attributes:
        batches: How many.
        seconds: Waited for them.
        reference: To what it reads; None: not known.
    """

    def __init__(self) -> None:
        self.batches = 0
        self.seconds = 0.0
        self.reference: SourceReference | None = None
        self.is_kept = False  # what it reads, as far as that is harmless
        self.ahead: deque[TakenBatch] = deque(maxlen=_KEPT)  # batches that no step has worked on yet
        self.shapes: frozenset[Hashable] = frozenset()  # of the batches taken since the last step
        self.steps = 0  # before which some were taken
        self.is_followed = False  # directly by a step
        self.has_gradients = False  # whether the loop could differentiate when it took the last one
        self.needs_gradients = False  # whether it could when it took one that a step followed
        self.trains = False  # whether steps work on its batches, as none does on those of a validation

    def worked_on(self, passes: int) -> int:
        """Return the units that a step of so many backward passes has worked on: loops may be a batch ahead."""
        count = max(1, passes, len(self.ahead) - _AHEAD)
        return sum(self.ahead.popleft().units for _ in range(min(count, len(self.ahead))))

    def drop_strays(self) -> None:
        """Forget batches that nothing was differentiated of: they were a validation's, with gradients on."""
        if any(batch.is_stray for batch in self.ahead):
            self.ahead = deque((batch for batch in self.ahead if not batch.is_stray), _KEPT)
            self.is_followed = self.is_followed and bool(self.ahead)


class LoaderUses:
    """The DataLoaders that a loop takes its batches from."""

    def __init__(self) -> None:
        self.used: dict[LoaderKey, LoaderUse] = {}
        self._iterator: weakref.ref[Any] = weakref.ref(self)
        self._use = LoaderUse()
        self._open: list[LoaderUse] = []  # with batches that no step has worked on
        self._newest = TakenBatch(0, 0)
        self._is_evaluated = False  # the newest batch, for sure
        self._sources = KeptSources()

    @property
    def is_training(self) -> bool:
        """Whether a step works on the batch that is taken now, as far as is known."""
        return self._use.trains and (torch.is_grad_enabled() or not self._use.needs_gradients)

    @property
    def is_evaluating(self) -> bool:
        """Whether none works on the batch that is asked for, as on those before it."""
        return self._use.batches > 0 and not self.is_training

    def ask(self, iterator: Any) -> None:
        """Note who is asked for a batch."""
        if self._iterator() is not iterator:
            self._iterator = weakref.ref(iterator)
            key = loader_key(iterator)
            use = self._use = self.used.setdefault(key, LoaderUse())
            if use.reference is None or not use.reference.is_of(iterator):
                use.reference, use.is_kept = SourceReference(iterator, key.batch_size), False

    def take(self, seconds: float) -> None:
        """Note that it has arrived after so many seconds of waiting."""
        use = self._use
        use.batches += 1
        use.seconds += seconds
        if use.seconds >= _WORTH_KEEPING and not use.is_kept:
            use.is_kept = True
            if use.reference is not None and (iterator := self._iterator()) is not None:
                self._sources.keep(use.reference, iterator)

    def hold(self, batch: Batch) -> None:
        """Note what it is."""
        use = self._use
        use.has_gradients = torch.is_grad_enabled()
        self._is_evaluated = False
        if use.needs_gradients and not use.has_gradients:
            return  # the model is evaluated on what it is trained on
        if not use.ahead:
            self._open.append(use)
        number = passes.nodes_made()
        self._newest.ended = number
        self._newest = TakenBatch(batch.units, number)
        use.ahead.append(self._newest)
        if batch.shapes not in use.shapes:
            use.shapes |= {batch.shapes}

    def release(self) -> None:
        """Keep nothing alive any more."""
        for use in self.used.values():
            use.reference = None

    def end_evaluation(self) -> None:
        """Forget batches taken without gradients, as the model is switched back to training: no step works on them."""
        self._is_evaluated = not self._use.has_gradients
        for use in self._open:
            if not use.has_gradients:
                use.ahead.clear()

    def see_pass(self, oldest: int) -> None:
        """Note a backward pass that differentiates no node of autograd's before this one; 0: not known."""
        for use in self._open:
            for batch in use.ahead:
                batch.is_used = batch.is_used or batch.ended is None or batch.ended > oldest

    def end_step(self, backward_passes: int, steps: int) -> tuple[int, frozenset[Hashable]]:
        """Return how much the step that ends has worked on, and the shapes of the batches taken in it.

        Batches of a validation are left out: there are several, or gradients are off, and no step follows directly, but
        a batch of another loader. Those of loaders that are used together are not, though a step follows only one of
        them directly. A validation of one batch with gradients on looks the same, but for nothing is differentiated.

        Args:
            backward_passes: Its own.
            steps: That there have been, this one included.
        """
        if self._use.batches and not self._is_evaluated:
            self._use.is_followed, self._use.needs_gradients = True, self._use.has_gradients
        units, shapes = 0, _NONE
        if not self._open:
            return units, shapes
        for use in self._open:
            use.steps += 1
            use.drop_strays()
            is_paired = use.has_gradients and (len(use.ahead) == 1 or 2 * use.steps > steps > 1)
            use.trains = bool(use.ahead) and (use.is_followed or is_paired)
            if use.trains:
                units += use.worked_on(backward_passes)
                shapes |= use.shapes
            else:
                use.ahead.clear()
            use.shapes = _NONE
        self._open = [use for use in self._open if use.ahead]
        return units, shapes


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
