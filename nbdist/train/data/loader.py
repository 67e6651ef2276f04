"""The loader that `prepare_loader` gives: the user's own DataLoader, rank-correct, that knows where in an epoch it is.

Joins the parts: which samples a rank takes is decided in sharding.py, where an epoch stands in epoch_position.py,
rank 0 reading for all is in dispatch.py, and the way to the device in feed.py.
"""

from __future__ import annotations

import copy
import functools
import itertools
import os
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset
from torch.utils.data.distributed import DistributedSampler

from nbdist.errors import UsageError
from nbdist.train import state
from nbdist.train.collective import agreement
from nbdist.train.collective.rng import draw_seed, seed_of_rank
from nbdist.train.data.dispatch import dispatched
from nbdist.train.data.epoch_position import Beginning, EpochPosition, LoaderPosition, agree
from nbdist.train.data.feed import WINDOW, DeviceFeed, LoadingWatch
from nbdist.train.data.sharding import Deal, ShardedBatches, ShardedIterable, length_of, samplers_of, tell_epoch

_SHARED_OUT = (
    "this loader's data divides itself among another number of ranks: create the loader again for {ranks}, and "
    "prepare it"
)


@dataclass(frozen=True)
class Manner:
    """How a loader is made rank-correct.

    Attributes:
        deal: What this rank takes of the batches.
        rank: Number of this rank.
        world_size: Number of ranks.
        device: Where batches go to; None: they are left where they are.
        seed: Of the order; None: one is drawn.
        agrees: Whether the ranks are those of the process group, so that they can agree.
        follows: Whether the share is that of this process's rank, which may become another one.
        shares: Whether nbdist deals batches out; else the data shares itself out.
        dispatch: Whether rank 0 reads for all.
        problem: Why this rank can't begin, which all ranks are to hear.
    """

    deal: Deal
    rank: int
    world_size: int
    device: torch.device | None
    seed: int | None
    agrees: bool
    follows: bool
    shares: bool
    dispatch: bool
    problem: str = ""

    @property
    def step(self) -> int:
        """Batches of the user's loader that all ranks together take at once."""
        return self.world_size if self.shares else 1


class PreparedLoader(DataLoader[Any]):
    """A DataLoader that gives each rank its batches; made by `prepare_loader`. It is of the user's class as well.

    Each iteration is an epoch, shuffled as its number says; one that was broken off is not taken up again, unless
    `load_state_dict(state_dict())` says so. The state is the same on all ranks, except that a StatefulDataLoader, and
    a loader whose data shares itself out, has one on each.
    """

    _manner: Manner
    _progress: LoaderPosition
    _source: ShardedBatches | ShardedIterable | None
    _skip: int
    _iteration: int  # number of the one that this loader began last
    _generators: list[torch.Generator]  # of the user's: their states are agreed on
    _seeded: list[torch.Generator]  # not of the user's: seeded in each epoch

    @classmethod
    def of(
        cls, loader: DataLoader[Any], source: ShardedBatches | ShardedIterable | None, manner: Manner
    ) -> PreparedLoader:
        """Copy the user's loader, taking its share from `source`; None if its dataset already provides the share."""
        changes: dict[str, Any] = {"_source": source, "_manner": manner, "_progress": LoaderPosition()}
        changes |= {"_skip": 0, "_iteration": 0}
        changes["_generators"], changes["_seeded"] = _generators_of(loader, source)
        if isinstance(source, ShardedIterable):
            changes["dataset"] = source
            changes["worker_init_fn"] = source.init_of_workers(loader.worker_init_fn)
        elif source is not None:
            changes["sampler" if loader.batch_sampler is None else "batch_sampler"] = source
        if manner.device is not None and manner.device.type == "cuda" and loader.num_workers:
            changes["pin_memory"] = True
        prepared = _rebuilt(type(loader), {**vars(loader), **changes, "generator": torch.Generator()})
        if manner.dispatch and source is not None:
            prepared._progress.total = agreement.tell(source.count())  # rank 0 alone may have the data
        return prepared

    def skipping(self, batches: int) -> PreparedLoader:
        """Return the same loader, but its iterations leave out so many of this rank's batches."""
        return _rebuilt(_user_class(type(self)), {**vars(self), "_skip": batches})

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuilt, (_user_class(type(self)), {**vars(self), "_iterator": None})

    @property
    def epoch(self) -> int:
        """Number of the epoch: the one begun last or, after its end, the next one."""
        resume = self._progress.resume
        return self._progress.epoch if resume is None else resume.epoch

    @property
    def iterating(self) -> bool:
        """Whether a loop over this loader is under way."""
        return self._progress.iterating

    @property
    def end_of_loader(self) -> bool:
        """Whether the batch given out last is the epoch's last."""
        return self._progress.end_of_loader

    @property
    def batches_left(self) -> int | None:
        """How many of this rank's batches come after the one given out last; None if unknown."""
        return self._progress.batches_left

    @property
    def remainder(self) -> int:
        """At the epoch's end: how many samples of all ranks' last batches together are real; -1 if unknown.

        Gathered in the order of ranks, the real ones come first.
        """
        return self._progress.tail if self._progress.end_of_loader else -1

    @property
    def total_batch_size(self) -> int | None:
        """Samples of all ranks' batches together; None if batches differ."""
        size = self._manner.deal.batch_size
        return None if size is None else size * self._manner.world_size

    @property
    def even_batches(self) -> bool:
        """Whether the last batches are completed so that all ranks see as many. Can be set between epochs."""
        return self._manner.deal.even

    @even_batches.setter
    def even_batches(self, even: bool) -> None:
        self._manner.deal.even = even
        if self._source is not None:
            self._source.deal.even = even

    def __len__(self) -> int:
        length = self._whole_length()
        if length is None:
            raise TypeError("this loader has no length, because its data has none")
        return max(0, length - self._skip)

    def set_epoch(self, epoch: int) -> None:
        """Make the next iteration that of another epoch. It is not needed: they are counted."""
        self._progress.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """Return the place after the batch given out last, from which `load_state_dict` goes on with the same order."""
        manner = self._manner
        place = self._progress.here(manner.step, self._generator_states)
        return place.as_state(manner.world_size, manner.deal.batch_size, self._progress.seed)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Let the next iteration give what comes after a place, also with another number of ranks or batch size.

        The order is the one that it was, whatever the plan's seed says now. What comes before the place is not loaded,
        unless the dataset is an iterable one that shares itself out.

        Raises:
            UsageError: It is not a state of this loader.
        """
        manner = self._manner
        place = EpochPosition.of_state(
            state_dict, len(self._generators), manner.world_size, manner.deal.batch_size, manner.shares
        )
        self._progress.resume = place
        self._progress.seed = state_dict["seed"]

    @property
    def is_alike_on_ranks(self) -> bool:
        """Whether its state is the same on all ranks."""
        return self._manner.shares and not hasattr(super(), "load_state_dict")

    def take_share(self, rank: int, world_size: int) -> str:
        """Give another share from the next iteration on: this process is another rank, or there are more or fewer.

        Where the loader is, in samples, stays; a loop that is under way can't go on.

        Returns:
            Why it can't; "" if it can.
        """
        manner = self._manner
        if not manner.follows:
            return ""
        self._progress.settle(manner.step)
        problem = "" if manner.shares else _SHARED_OUT.format(ranks=world_size)
        agrees = world_size > 1
        self._manner = replace(manner, rank=rank, world_size=world_size, agrees=agrees, problem=problem)
        if manner.shares:
            self._deal_again(rank, world_size)
        vars(self)["_iterator"] = None  # workers of before
        return problem

    def _deal_again(self, rank: int, world_size: int) -> None:
        for deal in [self._manner.deal, *([self._source.deal] if self._source is not None else [])]:
            deal.world_size = world_size
            deal.rank = rank if deal.rank is not None else None

    def note_step(self) -> None:
        """Note that an optimizer has made a step with the batches given out so far."""
        self._progress.note_step()

    def rewind(self) -> None:
        """Take up an iteration that was broken off: the next one goes on after the batch of the last optimizer step."""
        self._progress.rewind(self._manner.step)

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        self._begin()
        progress, training = self._progress, state.current()
        self._iteration = iteration = progress.iteration
        training.enter_loader(self)
        feed, watch = DeviceFeed(self._manner.device), LoadingWatch()
        batches, manner = self._batches(feed), self._manner
        try:
            coming = next(batches, None)
            while coming is not None:
                if self._manner is not manner:
                    raise UsageError("the number of ranks has changed since this loop began: start a new loop")
                (batch, stateful), coming = coming, self._next(batches, watch)
                last = coming is None
                if last and not self._manner.dispatch:
                    progress.tail = self._known_tail()
                progress.give(stateful, last)
                yield feed.arrive(batch)
            progress.end()
        finally:  # perhaps long after it was left, as when a traceback holds it, and amidst the next
            if iteration == progress.iteration:
                progress.iterating = False
            if iteration == self._iteration:
                training.leave_loader(self)

    def _batches(self, feed: DeviceFeed) -> Iterator[tuple[Any, Any]]:
        """Yield this rank's batches, on their way to the device, and what a StatefulDataLoader says after each."""
        place = self._progress.place
        batches: Iterator[Any]
        if self._manner.dispatch:
            reading = self._read() if self._manner.rank == 0 else None
            batches = dispatched(reading, self._known_tail, self._note_tail, self._manner.device)
        else:
            batches = super().__iter__()
        if self._source is None and place.stateful is None:
            batches = itertools.islice(batches, place.batches, None)
        for batch in batches:
            yield feed.send(batch), self._inner_state()

    def _read(self) -> Iterator[Any]:
        """Yield what rank 0 reads. Workers start with the first batch, so that all ranks hear of it if they can't."""
        yield from super().__iter__()

    def _next(self, batches: Iterator[Any], watch: LoadingWatch) -> tuple[Any, Any] | None:
        watch.ask()
        coming: tuple[Any, Any] | None = next(batches, None)
        times = watch.arrived()
        if times is not None and self._manner.rank == 0:
            warnings.warn(self._advice(*times), stacklevel=3)
        return coming

    def _begin(self) -> None:
        """Agree with the other ranks on the epoch, and tell everyone of it."""
        progress, manner = self._progress, self._manner
        beginning = self._beginning()
        if manner.agrees:
            beginning = agree(beginning, manner.shares)
        elif manner.problem:
            raise UsageError(manner.problem)
        place, seed = beginning.place, beginning.seed
        progress.seed = seed
        for generator, before in zip(self._generators, place.generators or (), strict=True):
            generator.set_state(before)
        for generator in self._seeded:
            generator.manual_seed(seed + place.epoch)
        for part in self._told_of_epochs():
            tell_epoch(part, place.epoch)
        progress.told_epoch = place.epoch
        self.generator.manual_seed(seed_of_rank(seed, place.epoch, manner.rank))  # of which workers get theirs
        self._begin_stateful(place)
        if self._source is not None:
            self._source.begin(place.epoch, seed, place.base)
        else:
            tell_epoch(self.dataset, place.epoch, seed)
        if manner.dispatch:
            progress.total = beginning.total
        progress.begin(place, self._expected(place.batches))

    def _beginning(self) -> Beginning:
        """Return how this rank would begin."""
        progress, manner = self._progress, self._manner
        self._adopt_epoch()
        place = progress.next_place()
        start = max(place.batches, self._skip * manner.step)
        if place.stateful is None or start > place.batches or not hasattr(super(), "load_state_dict"):
            place = replace(place, batches=start, base=start, stateful=None)
        if place.generators is None:
            place = replace(place, generators=self._generator_states())
        if progress.seed is None:
            progress.seed = manner.seed if manner.seed is not None else draw_seed()
        total = self._source.count() if self._source is not None else None
        if manner.dispatch:
            return Beginning(place, progress.seed, manner.problem, total=total)
        if manner.shares:
            samples = None if isinstance(self.dataset, IterableDataset) else length_of(self.dataset)
            return Beginning(place, progress.seed, manner.problem, length=total, samples=samples)
        length = self._whole_length() if self.even_batches else None
        return Beginning(place, progress.seed, manner.problem, length=length)

    def _adopt_epoch(self) -> None:
        """Believe a user who has called `set_epoch` of a DistributedSampler."""
        for part in self._told_of_epochs():
            if isinstance(part, DistributedSampler) and part.epoch != self._progress.told_epoch:
                self.set_epoch(part.epoch)

    def _begin_stateful(self, place: EpochPosition) -> None:
        load = getattr(super(), "load_state_dict", None)
        if load is not None and not (self._manner.dispatch and self._manner.rank):
            load(dict(place.stateful or {}))

    def _inner_state(self) -> Mapping[str, Any] | None:
        """Return what a StatefulDataLoader says of itself; None for others."""
        save = getattr(super(), "state_dict", None)
        if save is None or (self._manner.dispatch and self._manner.rank):
            return None
        inner: Mapping[str, Any] = copy.deepcopy(save())  # the data's own may live on, and the next batch is read now
        return inner

    def _expected(self, start: int) -> int | None:
        """Return how many batches this rank gives out from a place to the end."""
        if self._source is None:
            length = self._whole_length()
            return None if length is None else max(0, length - start)
        total = self._progress.total
        count = self._source.count(start) if total is None else max(0, total - start)
        return None if count is None else self._manner.deal.share(count)

    def _whole_length(self) -> int | None:
        """Return how many batches this rank gives out in a whole epoch, None if unknown."""
        if self._source is None:
            try:
                return super().__len__()
            except (TypeError, NotImplementedError, AttributeError):  # as length_of
                return None
        total = self._source.count() if self._progress.total is None else self._progress.total
        return None if total is None else self._manner.deal.share(total)

    def _known_tail(self) -> int:
        """Real samples of the last round. With uneven ones, only the first ranks take part in it."""
        if self._source is None or not self._manner.shares:
            return -1
        return self._source.remainder if self.even_batches or self._manner.world_size == 1 else -1

    def _note_tail(self, tail: int) -> None:
        self._progress.tail = tail

    def _told_of_epochs(self) -> list[Any]:
        """Return samplers, and a map-style dataset, that may want to know the epoch."""
        if not isinstance(self._source, ShardedBatches):
            return []
        return [*samplers_of(self._source.batch_sampler), self.dataset]

    def _generator_states(self) -> tuple[torch.Tensor, ...]:
        return tuple(generator.get_state() for generator in self._generators)

    def _advice(self, waited: float, total: float) -> str:
        """Return what to change when training waits for data. Seconds for each batch."""
        if self.num_workers:
            cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
            change = f"num_workers above {self.num_workers} (there are {cores} cores)"
        else:
            change = "num_workers=2 or more"
        change += "" if self.persistent_workers else ", persistent_workers=True"
        change += "" if self.pin_memory or not torch.accelerator.is_available() else ", pin_memory=True"
        reader = ":"
        if self._manner.dispatch:
            reader = ", because rank 0 reads for all ranks: plan dispatch=False if each can read, or"
        return (
            f"waiting for data took {waited / total:.0%} of the last {WINDOW} steps ({waited * 1e3:.0f} of "
            f"{total * 1e3:.0f} ms each){reader} give the DataLoader {change}"
        )


def _generators_of(
    loader: DataLoader[Any], source: ShardedBatches | ShardedIterable | None
) -> tuple[list[torch.Generator], list[torch.Generator]]:
    """Return the generators that order samples: the user's, and those that StatefulDataLoader creates."""
    users: list[torch.Generator] = []
    others: list[torch.Generator] = []
    for sampler in samplers_of(source.batch_sampler) if isinstance(source, ShardedBatches) else ():
        generator = getattr(sampler, "generator", None)
        if not isinstance(generator, torch.Generator) or generator in users or generator in others:
            continue
        made = type(sampler).__module__.startswith("torchdata.") and loader.generator is None
        (others if made else users).append(generator)
    return users, others


def _rebuilt(base: Any, attributes: Mapping[str, Any]) -> PreparedLoader:
    """Return a prepared loader of the user's class. Built from attributes, as a class may have any arguments."""
    prepared = _prepared_class(base)
    loader: PreparedLoader = prepared.__new__(prepared)
    vars(loader).update(attributes, _iterator=None)
    return loader


@functools.cache
def _prepared_class(base: Any) -> type[PreparedLoader]:
    return PreparedLoader if base is DataLoader else type(f"Prepared{base.__name__}", (PreparedLoader, base), {})


def _user_class(prepared: type[PreparedLoader]) -> type[DataLoader[Any]]:
    return DataLoader if prepared is PreparedLoader else prepared.__bases__[1]
