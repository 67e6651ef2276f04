"""Data for tests of loaders. Its text runs as a cell on ranks, too."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler, get_worker_info

from nbdist.plan import Plan
from nbdist.train.data.loader import PreparedLoader
from nbdist.train.data.loaders import prepare_loader


class Pair(NamedTuple):
    left: Any
    right: Any


class Numbers(Dataset[Any]):
    def __init__(self, size: int) -> None:
        self.size = size
        self.epochs: list[int] = []
        self.read = 0

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: Any) -> Any:
        self.read += 1
        return index

    def set_epoch(self, epoch: int) -> None:
        self.epochs.append(epoch)


class Stream(IterableDataset[Any]):
    """Numbers without a known length."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __iter__(self) -> Iterator[Any]:
        return iter(range(self.size))


class SizedStream(Stream):
    def __len__(self) -> int:
        return self.size


class WorkerStream(Stream):
    """Shares itself out between workers, as the documentation of torch shows it."""

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        return iter(range(first, self.size, step))


class ShuffledStream(Stream):
    """Shuffles with the global generators, while it is read."""

    def __iter__(self) -> Iterator[Any]:
        numbers = list(range(self.size))
        random.shuffle(numbers)
        while numbers:
            yield numbers.pop(int(numpy.random.randint(len(numbers))))


class Span(IterableDataset[int]):
    """Of it `takes_its_part` leaves a worker its part."""

    def __init__(self, start: int, end: int) -> None:
        self.start, self.end = start, end

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.start, self.end))


def takes_its_part(_: int) -> None:
    info = get_worker_info()
    assert info is not None and isinstance(info.dataset, Span)
    span = info.dataset
    size = -(-(span.end - span.start) // info.num_workers)
    span.start += info.id * size
    span.end = min(span.start + size, span.end)


class PlacedStream(Stream):
    """Knows where it is, and gives that away as it keeps it."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.state = {"read": 0}

    def __iter__(self) -> Iterator[Any]:
        while self.state["read"] < self.size:
            self.state["read"] += 1
            yield self.state["read"] - 1

    def state_dict(self) -> dict[str, int]:
        return self.state

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.state = dict(state)


class EpochStream(Stream):
    epoch = -1

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        return iter([self.epoch] * self.size)


class GeneratorStream(Stream):
    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.generator = torch.Generator()

    def __iter__(self) -> Iterator[Any]:
        return iter(torch.randperm(self.size, generator=self.generator).tolist())


class Draws(Dataset[torch.Tensor]):
    """What workers draw."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.randint(2**40, ())


class AnySampler(Sampler[int]):
    """A sampler of the user's own, that shuffles with the global generators, and goes on to draw."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __iter__(self) -> Iterator[int]:
        numbers = list(range(self.size))
        while numbers:
            numbers.sort()
            random.shuffle(numbers)
            yield numbers.pop(int(numpy.random.randint(len(numbers))))


class Buckets(Sampler[list[int]]):
    """Batches of other sizes, as those by length are."""

    batch_size: int  # of samplers that say one

    def __init__(self, *sizes: int) -> None:
        self.sizes = sizes

    def __len__(self) -> int:
        return len(self.sizes)

    def __iter__(self) -> Iterator[list[int]]:
        numbers = iter(range(sum(self.sizes)))
        for size in self.sizes:
            yield [next(numbers) for _ in range(size)]


def maker(
    kind: str, size: int, batch_size: int | None, drop_last: bool = False, workers: int = 0
) -> Callable[[], DataLoader[Any]]:
    """What makes loaders of such data."""
    data: dict[str, Callable[[], dict[str, Any]]] = {
        "sequential": lambda: {"dataset": Numbers(size)},
        "shuffled": lambda: {"dataset": Numbers(size), "shuffle": size > 0},
        "sampler": lambda: {"dataset": Numbers(size), "sampler": AnySampler(size)},
        "stream": lambda: {"dataset": Stream(size)},
        "sized stream": lambda: {"dataset": SizedStream(size)},
        "shuffled stream": lambda: {"dataset": ShuffledStream(size)},
    }
    return lambda: DataLoader(**data[kind](), batch_size=batch_size, drop_last=drop_last, num_workers=workers)


def lists(loader: Iterable[Any]) -> list[Any]:
    """The batches of one epoch."""
    return [batch.tolist() if isinstance(batch, torch.Tensor) else batch for batch in loader]


def all_ranks(
    make: Callable[[], DataLoader[Any]], world_size: int, plan: Plan | None = None, sharded: bool = False
) -> list[PreparedLoader]:
    """A loader for each rank, of one process."""
    plan = plan or Plan(seed=0)
    return [
        prepare_loader(make(), plan=plan, rank=rank, world_size=world_size, sharded=sharded)
        for rank in range(world_size)
    ]


def rounds(loaders: Sequence[Iterable[Any]]) -> list[list[Any]]:
    """What the ranks together see in each step of one epoch, in the order of ranks."""
    batches = [lists(loader) for loader in loaders]
    longest = max(map(len, batches))
    return [[rank[step] for rank in batches if step < len(rank)] for step in range(longest)]


def flat(batches: Iterable[Any]) -> list[Any]:
    return [sample for batch in batches for sample in (flat(batch) if isinstance(batch, list) else [batch])]


def real(steps: Sequence[Any], remainder: int) -> list[Any]:
    """The samples of an epoch without those that complete the last step."""
    if not steps:
        return []
    last = flat(steps[-1])
    return flat(steps[:-1]) + (last if remainder < 0 else last[:remainder])
