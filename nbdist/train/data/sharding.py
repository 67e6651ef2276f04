"""Which samples each rank takes. Knows samplers, iterable datasets and their workers; not loaders or process groups.

The batches of an epoch are dealt out in turn: of each round, which is one batch for every rank, a rank takes its own.
The whole order is drawn on every rank, alike; loaded is only a rank's share. What is real in the last round comes
first in the order of ranks, and what completes it last.
"""

from __future__ import annotations

import functools
import itertools
import math
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy
import torch
from torch.utils.data import IterableDataset, Sampler, get_worker_info

from nbdist.errors import UsageError
from nbdist.train.collective.rng import AgreedDraws

_INDICES = (list, tuple, range, numpy.ndarray, torch.Tensor)  # what batches of indices come in


@dataclass
class Deal:
    """How the batches of a loader are dealt out.

    Attributes:
        rank: Who takes its own of each round; None takes them all.
        world_size: Batches of a round.
        even: Whether the last round is completed from the start of the epoch. One rank alone needs no completion.
        drop_last: Whether an incomplete last round is dropped.
        batch_size: Samples of a batch; None if batches differ, or are no lists of samples.
    """

    rank: int | None
    world_size: int
    even: bool
    drop_last: bool
    batch_size: int | None

    @property
    def completes(self) -> bool:
        """Whether the last round is completed."""
        return self.even and self.world_size > 1 and not self.drop_last

    def share(self, batches: int) -> int:
        """Return how many of so many batches are taken."""
        rounds, rest = divmod(batches, self.world_size)
        if self.drop_last:
            rest = 0
        elif self.completes and rest:
            rest = self.world_size
        if self.rank is None:
            return rounds * self.world_size + rest
        return rounds + (self.rank < rest)


class ShardedBatches(Sampler[Any]):
    """A batch sampler that gives a rank its share of another's batches.

    Args:
        batch_sampler: Gives the batches of all ranks: lists of indices, or anything that the dataset takes.
        deal: Who takes what.
    """

    def __init__(self, batch_sampler: Iterable[Any], deal: Deal) -> None:
        self.batch_sampler = batch_sampler
        self.deal = deal
        self.batch_size = deal.batch_size
        self.drop_last = deal.drop_last
        self.remainder = -1
        self._seed = 0
        self._start = 0

    @property
    def sampler(self) -> Any:
        """The sampler below the batch sampler."""
        return getattr(self.batch_sampler, "sampler", self.batch_sampler)

    def begin(self, epoch: int, seed: int, start: int) -> None:
        """Set what the next iteration does.

        Args:
            epoch: Number of the epoch.
            seed: Of the training, the same on all ranks.
            start: How many batches (of all ranks together) are left out at the start; they are not loaded.
        """
        self._seed = seed + epoch
        self._start = start

    def count(self, start: int = 0) -> int | None:
        """Return batches of all ranks together from `start` on; None if unknown."""
        length = length_of(self.batch_sampler)
        return None if length is None else max(0, length - start)

    def __len__(self) -> int:
        return self.deal.share(len(self.batch_sampler))  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Any]:
        return self._own(self._seed, self._start)

    def _own(self, seed: int, start: int) -> Iterator[Any]:
        self.remainder = -1
        size, rank = self.deal.world_size, self.deal.rank
        draws = AgreedDraws(seed)
        with draws:
            batches = iter(self.batch_sampler)
            opening = list(itertools.islice(batches, size))
        again: AbstractContextManager[None] = nullcontext() if draws_at_start_only(self.batch_sampler) else draws
        with again:
            rest = itertools.islice(itertools.chain(opening, batches), start, None)
            coming = list(itertools.islice(rest, size))
        while coming:
            current = coming
            with again:
                coming = list(itertools.islice(rest, size))
            if self.deal.drop_last and len(current) < size:
                return
            self.remainder = _samples(current)
            if not coming and self.deal.completes:
                current = self._completed(current, opening)
            yield from current if rank is None else current[rank : rank + 1]

    def _completed(self, batches: list[Any], opening: list[Any]) -> list[Any]:
        """Fill up a round with full-size batches for all ranks, from the last one on: real samples come first."""
        missing = self.deal.world_size - len(batches)
        size = self.deal.batch_size
        if size is None:
            return batches + list(itertools.islice(itertools.cycle(opening), missing))
        spare = itertools.cycle(itertools.chain.from_iterable(opening))
        full = batches[:-1]
        for batch in [batches[-1], *([] for _ in range(missing))]:
            lacking = size - len(batch)
            full.append([*batch, *itertools.islice(spare, lacking)] if lacking > 0 else batch)
        return full


class ShardedIterable(IterableDataset[Any]):
    """An iterable dataset of which a rank, and each of its workers, takes its share.

    Every worker reads the whole stream, as a stream can't be read anywhere but from its start. So the order does not
    depend on the number of workers, and it does not matter whether the dataset shares itself out between workers: it
    is shown a single one. A dataset for which that is too slow shares itself out between ranks and workers.

    Args:
        dataset: The user's.
        deal: Who takes what.
        shared: Whether workers are other processes that must be told of each epoch.
    """

    def __init__(self, dataset: IterableDataset[Any], deal: Deal, shared: bool) -> None:
        self.dataset = dataset
        self.deal = deal
        # epoch, seed, start, whether the end is completed; epoch of the remainder, remainder
        told = torch.tensor([0, 0, 0, 0, -1, -1])
        self._told = told.share_memory_() if shared else told

    def init_of_workers(self, init: Callable[[int], object] | None) -> Callable[[int], object] | None:
        """Return the user's `worker_init_fn`, shown one worker with the user's dataset: it may divide the stream."""
        return None if init is None else functools.partial(_init_as_the_only_worker, init)

    @property
    def remainder(self) -> int:
        """Real samples of the last round, once some worker has come to the stream's end in this epoch; else -1."""
        epoch, *_, ended, remainder = self._told.tolist()
        return int(remainder) if ended == epoch else -1

    @property
    def seed(self) -> int:
        """Of this epoch."""
        return int(self._told[0] + self._told[1])

    def begin(self, epoch: int, seed: int, start: int) -> None:
        """Begin like `ShardedBatches.begin`; persistent workers learn of it too."""
        self._told.copy_(torch.tensor([epoch, seed, start, self.deal.even, -1, -1]))

    def count(self, start: int = 0) -> int | None:
        """Return batches of all ranks together from `start` on; None if unknown."""
        length = length_of(self.dataset)
        if length is None:
            return None
        size = self.deal.batch_size or 1
        return max(0, (length // size if self.deal.drop_last else math.ceil(length / size)) - start)

    def __len__(self) -> int:
        length = len(self.dataset)  # type: ignore[arg-type]
        if self.deal.world_size == 1:
            return length
        return self.deal.share(self.count() or 0) * (self.deal.batch_size or 1)

    def __iter__(self) -> Iterator[Any]:
        worker, workers = _this_worker()
        epoch, seed, start, self.deal.even, _, _ = self._told.tolist()
        stream = _Stream(self.dataset, epoch, seed, self.deal.batch_size or 1, self.deal.world_size)
        stream.skip(start)
        for number in itertools.count():
            mine = [block for block, turn in self._turns(number) if turn % workers == worker]
            blocks, size = stream.round(mine)
            incomplete = size < stream.round_size
            if size == 0 or (incomplete and self.deal.drop_last):
                return
            self._told[-2:] = torch.tensor([epoch, size])
            if incomplete and self.deal.completes:
                blocks = stream.completed(blocks)
            for block in blocks:
                yield from block
            if incomplete:
                return

    def _turns(self, number: int) -> Iterator[tuple[int, int]]:
        """Yield the blocks of a round that are this rank's, and which batch of the rank each is."""
        if self.deal.rank is not None:
            yield self.deal.rank, number
            return
        for block in range(self.deal.world_size):
            yield block, number * self.deal.world_size + block


@dataclass
class _Stream:
    """An iterable dataset, read in rounds, the same on all ranks.

    Between rounds nothing is drawn by the dataset, so that random numbers can be swapped once for each round.
    """

    dataset: IterableDataset[Any]
    epoch: int
    seed: int
    block_size: int
    blocks: int
    _opening: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.round_size = self.block_size * self.blocks
        self._draws = AgreedDraws(self.seed + self.epoch)
        tell_epoch(self.dataset, self.epoch, self.seed)
        with self._as_the_only_reader():
            self._elements = iter(self.dataset)

    def skip(self, blocks: int) -> None:
        """Leave out so many blocks."""
        with self._as_the_only_reader():
            deque(map(self._note, itertools.islice(self._elements, blocks * self.block_size)), maxlen=0)

    def round(self, wanted: Sequence[int]) -> tuple[list[list[Any]], int]:
        """Return the wanted blocks of the next round, and how many elements the whole round has."""
        taken: dict[int, list[Any]] = {block: [] for block in wanted}
        size = 0
        with self._as_the_only_reader():
            for element in map(self._note, itertools.islice(self._elements, self.round_size)):
                if (block := size // self.block_size) in taken:
                    taken[block].append(element)
                size += 1
        return list(taken.values()), size

    def completed(self, blocks: list[list[Any]]) -> list[list[Any]]:
        """Return blocks of full size, completed by the first elements of the stream."""
        spare = itertools.cycle(self._opening)
        return [[*block, *itertools.islice(spare, self.block_size - len(block))] for block in blocks]

    def _note(self, element: Any) -> Any:
        if len(self._opening) < self.block_size:
            self._opening.append(element)
        return element

    @contextmanager
    def _as_the_only_reader(self) -> Iterator[None]:
        with self._draws, _only_worker(self.dataset, self.seed + self.epoch):
            yield


def _init_as_the_only_worker(init: Callable[[int], object], _: int) -> None:
    info: Any = get_worker_info()
    with _only_worker(info.dataset.dataset, info.dataset.seed):
        init(0)


@contextmanager
def _only_worker(dataset: IterableDataset[Any], seed: int) -> Iterator[None]:
    """Let `get_worker_info()` tell of a single worker with this dataset, and the same seed on all ranks."""
    info = get_worker_info()
    if info is None:
        yield
        return
    module: Any = sys.modules.get("torch.utils.data._utils.worker")
    known: Any = getattr(module, "_worker_info", None)
    if known is not info:
        raise UsageError(
            "this version of torch does not let nbdist share an iterable dataset out between workers: "
            "pass num_workers=0, or let the dataset shard itself and pass sharded=True"
        )
    alone = type(info)(id=0, num_workers=1, seed=seed, dataset=dataset)
    module._worker_info = alone
    try:
        yield
    finally:
        module._worker_info = info


def _this_worker() -> tuple[int, int]:
    info = get_worker_info()
    return (0, 1) if info is None else (info.id, info.num_workers)


def _samples(batches: Sequence[Any]) -> int:
    """Return how many samples batches of indices have; -1 if they are something else."""
    sizes = [size for batch in batches if isinstance(batch, _INDICES) and (size := length_of(batch)) is not None]
    return sum(sizes) if len(sizes) == len(batches) else -1


def length_of(thing: Any) -> int | None:
    """Return its length, None if it has none."""
    try:
        return len(thing)
    except (TypeError, NotImplementedError, AttributeError):
        return None


def samplers_of(sampler: Any) -> list[Any]:
    """Return a sampler and what it is made from, outermost first."""
    found: list[Any] = []
    waiting = [sampler]
    while waiting:
        sampler = waiting.pop(0)
        if sampler is not None and not any(sampler is known for known in found):
            found.append(sampler)
            waiting += [getattr(sampler, "batch_sampler", None), getattr(sampler, "sampler", None)]
    return found


def draws_at_start_only(sampler: Any) -> bool:
    """Return whether it is known to use global random generators only before its first batch."""
    return all(type(part).__module__.startswith(("torch.", "torchdata.")) for part in samplers_of(sampler))


def tell_epoch(thing: Any, epoch: int, seed: int | None = None) -> None:
    """Call `set_epoch` of a sampler or dataset; one that has a generator instead is seeded."""
    set_epoch: Callable[[int], Any] | None = getattr(thing, "set_epoch", None)
    if callable(set_epoch):
        set_epoch(epoch)
    elif seed is not None and isinstance(generator := getattr(thing, "generator", None), torch.Generator):
        generator.manual_seed(seed + epoch)
