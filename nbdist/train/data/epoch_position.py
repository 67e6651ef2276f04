"""Where a loader is in its epochs, and how ranks agree on it. Independent of samplers, batches or devices."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from nbdist.base.ranks import describe_ranks
from nbdist.errors import UsageError
from nbdist.train.collective.agreement import gather, refuse_failures
from nbdist.train.collective.participants import refuse_partial
from nbdist.train.state import world_size

_KEYS = {"epoch", "batches", "world_size", "seed", "generators"}


@dataclass(frozen=True)
class EpochPosition:
    """A place in an epoch.

    Attributes:
        epoch: Number of the epoch.
        batches: Batches of all ranks together that lie before it.
        generators: States, at the start of the epoch, of the generators that order the samples.
        stateful: What a StatefulDataLoader says of itself there.
        base: Batches that were left out before the StatefulDataLoader began to count.
    """

    epoch: int
    batches: int = 0
    generators: tuple[torch.Tensor, ...] | None = None
    stateful: Mapping[str, Any] | None = None
    base: int = 0

    @classmethod
    def of_state(
        cls, state: Mapping[str, Any], generators: int, world_size: int, batch_size: int | None, shares: bool
    ) -> EpochPosition:
        """Return the place that `state_dict()` has written down, perhaps with another number of ranks or batch size.

        If no batch begins there now, it is the beginning of the one that goes over it: nothing is left out.
        """
        missing = ", ".join(sorted(_KEYS - set(state)))
        if missing or len(state["generators"]) != generators:
            why = f"it lacks {missing}" if missing else "it belongs to one with another sampler"
            raise UsageError(f"this is not a state of this loader, because {why}: give what its state_dict() returned")
        place = cls(state["epoch"], state["batches"], tuple(state["generators"]))
        before, now = (state["world_size"], state.get("batch_size", batch_size)), (world_size, batch_size)
        if before == now:
            return replace(place, stateful=state.get("stateful"), base=state.get("base", 0))
        batches, each = place.batches, 1
        if None not in (before[1], batch_size):
            batches, each = batches * before[1], batch_size or 1
        if not shares:
            batches, each = batches * before[0], each * world_size
        return replace(place, batches=batches // each)

    def as_state(self, world_size: int, batch_size: int | None, seed: int | None) -> dict[str, Any]:
        """Return the place in plain values and tensors."""
        state = {
            "epoch": self.epoch,
            "batches": self.batches,
            "world_size": world_size,
            "batch_size": batch_size,
            "seed": seed,
            "generators": list(self.generators or ()),
        }
        return state if self.stateful is None else {**state, "stateful": self.stateful, "base": self.base}


@dataclass
class LoaderPosition:
    """Where a loader is. Shared with the loaders that `skip_first_batches` makes of it.

    Attributes:
        epoch: Number of the epoch, the next one if none is under way.
        begun: Whether a batch of it has been asked for.
        iterating: Whether a loop is under way.
        iteration: Its number, or that of the last one.
        place: Where the iteration has begun.
        given: Batches given out on this rank since then.
        expected: Batches that this rank gives out from there to the end, None if unknown.
        total: Batches of all ranks in an epoch as rank 0 has told, where it alone knows.
        seed: Of the order, the same on all ranks.
        told_epoch: The epoch that samplers have been told last.
        resume: Where the next iteration is to begin, if that has been said.
        stateful: What a StatefulDataLoader says of itself after the batch given out last.
        tail: Real samples of the last round, as far as known.
        stepped: Batches given out, and `stateful`, when an optimizer made its last step in this iteration.
    """

    epoch: int = 0
    begun: bool = False
    iterating: bool = False
    iteration: int = 0
    place: EpochPosition = EpochPosition(0)
    given: int = 0
    expected: int | None = None
    total: int | None = None
    seed: int | None = None
    told_epoch: int = 0
    resume: EpochPosition | None = None
    stateful: Mapping[str, Any] | None = None
    tail: int = -1
    end_of_loader: bool = False
    stepped: tuple[int, Mapping[str, Any] | None] = (0, None)

    @property
    def batches_left(self) -> int | None:
        """Batches of this rank after the one given out last, None if unknown."""
        if self.end_of_loader:
            return 0
        return None if self.expected is None else max(1, self.expected - self.given)

    def next_place(self) -> EpochPosition:
        """Return where the next iteration begins. One that was broken off is not taken up again."""
        return self.resume if self.resume is not None else EpochPosition(self.epoch + self.begun)

    def set_epoch(self, epoch: int) -> None:
        """Make the next iteration that of this epoch."""
        if self.resume is None or self.resume.epoch != epoch:
            self.epoch, self.begun, self.resume = epoch, False, None

    def begin(self, place: EpochPosition, expected: int | None) -> None:
        """Begin an iteration."""
        self.epoch, self.place, self.expected = place.epoch, place, expected
        self.begun = self.iterating = True
        self.iteration += 1
        self.given, self.tail, self.end_of_loader = 0, -1, False
        self.stepped = (0, None)
        self.resume = self.stateful = None

    def give(self, stateful: Mapping[str, Any] | None, last: bool) -> None:
        """Count a batch that is given out."""
        self.given += 1
        self.stateful, self.end_of_loader = stateful, last

    def note_step(self) -> None:
        """Note that the batches given out so far have been trained on."""
        self.stepped = self.given, self.stateful

    def rewind(self, step: int) -> None:
        """Let the next iteration begin behind the batches that have been trained on. `step`: as of `here`."""
        if self.begun and self.resume is None:
            given, stateful = self.stepped
            self.resume = replace(self.place, batches=self.place.batches + given * step, stateful=stateful)

    def settle(self, step: int) -> None:
        """Count the batches that have been trained on among those before the iteration. `step`: as of `here`.

        What comes afterwards may be shared out between another number of ranks.
        """
        if self.begun and self.resume is None:
            given, stateful = self.stepped
            self.place = replace(self.place, batches=self.place.batches + given * step, stateful=stateful)
            self.given, self.stepped = 0, (0, stateful)

    def end(self) -> None:
        """Note that all batches were given out, and the last one was processed."""
        self.epoch, self.begun, self.given = self.epoch + 1, False, 0

    def here(self, step: int, generators: Callable[[], tuple[torch.Tensor, ...]]) -> EpochPosition:
        """Return the place after the batch given out last. `step`: batches of all ranks for each one of this rank."""
        if self.resume is not None:
            return self.resume
        if not self.begun:
            return EpochPosition(self.epoch, generators=generators())
        return replace(self.place, batches=self.place.batches + self.given * step, stateful=self.stateful)


@dataclass(frozen=True)
class Beginning:
    """What a rank tells the others before an epoch.

    Attributes:
        place: Where it would begin.
        seed: What it would shuffle with.
        problem: Why it can't begin.
        length: What must be the same on all ranks: the number of batches.
        samples: Likewise, the length of the dataset of which each takes a share; None: none, or not known.
        total: Batches of all ranks, told by rank 0 where it alone reads.
    """

    place: EpochPosition
    seed: int
    problem: str = ""
    length: int | None = None
    samples: int | None = None
    total: int | None = None


def agree(mine: Beginning, shares: bool) -> Beginning:
    """Begin as rank 0 does. A collective over all ranks.

    Args:
        mine: What this rank would do.
        shares: Whether ranks take shares of the same data.

    Raises:
        UsageError: On all ranks: one can't begin, or they have other numbers of batches, or are at other places.
    """
    refuse_partial("this loader", world_size())
    told = dict(enumerate(gather(mine)))
    refuse_failures([other.problem for other in told.values()])
    lengths = _who(told, lambda other: "an unknown number of" if other.length is None else f"{other.length:,}")
    if len(lengths) > 1:
        raise UsageError(
            "ranks have different numbers of batches: "
            + ", ".join(f"{length} on {ranks}" for length, ranks in lengths.items())
            + (
                ". Give all ranks the same data: each takes its share; or pass sharded=True if each has its own"
                if shares
                else ". Make them equal, or plan even_batches=False and train inside join_uneven_inputs"
            )
        )
    samples = _who(told, lambda other: f"{other.samples or 0:,}")
    if len(samples) > 1:
        raise UsageError(
            "ranks have datasets of different lengths: "
            + ", ".join(f"{length} on {ranks}" for length, ranks in samples.items())
            + ". Give all ranks the same data: each takes its share; or pass sharded=True if each has its own"
        )
    resumes = any(other.place.batches for other in told.values())
    places = _who(told, lambda other: f"batch {other.place.batches:,} of epoch {other.place.epoch}")
    if resumes and len(places) > 1:
        raise UsageError(
            "ranks would continue from different places: "
            + ", ".join(f"{place} on {ranks}" for place, ranks in places.items())
            + ". Load the same checkpoint on all ranks"
        )
    # After an interrupt some ranks may have ended an epoch, and others not.
    epoch = max(other.place.epoch for other in told.values())
    first = told[0]
    generators = first.place.generators if shares else mine.place.generators
    return replace(
        mine, place=replace(mine.place, epoch=epoch, generators=generators), seed=first.seed, total=first.total
    )


def _who(told: Mapping[int, Beginning], what: Callable[[Beginning], str]) -> dict[str, str]:
    """Return the ranks that say the same."""
    found: defaultdict[str, list[int]] = defaultdict(list)
    for rank, beginning in told.items():
        found[what(beginning)].append(rank)
    return {text: describe_ranks(ranks) for text, ranks in found.items()}
