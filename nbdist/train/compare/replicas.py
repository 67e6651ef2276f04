"""Whether ranks hold equal models, optimizers and the like, and how they come to: `check` and `sync`.

Ranks first tell each other a hash per tensor, in one gather of objects. From then on all know the same and decide
alike: what is wrong raises on every rank before anything has changed, and only what differs is sent. Tensors travel
as bytes, so they are equal to the last bit afterwards, NaN included. A shard (FSDP2, tensor parallelism) is compared
with, and taken from, ranks that hold the same shard. Independent of the wire or the notebook; works under torchrun.

What the two functions are given is read and written in `nbdist.train.compare.parts`.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from nbdist.base.ranks import describe_ranks
from nbdist.errors import UsageError
from nbdist.train import active_training
from nbdist.train.collective.agreement import gather, refuse_differing, refuse_failures
from nbdist.train.compare.parts import Argument, Described, Entry, Team, describe
from nbdist.train.compare.prepared import rewind_loaders


@dataclass(frozen=True)
class TornShards:
    """Why no state could be taken: shards that have no replica belong to different steps. `advice`: what to do."""

    text: str
    advice: str


@dataclass(frozen=True)
class CheckReport:
    """What `check` has found, the same on every rank of the group. False in a condition if something differs.

    Attributes:
        differing: For each name that differs, the ranks that are not as most are (as the lowest, where none are most).
        compared: How many parameters, buffers and values of state could be compared, by kind.
        alone: How many shards have no replica on another rank, and so can't be compared.
        ranks: The ranks of the group.
        buffers_only: Whether something differs, and all that does are buffers.
    """

    differing: Mapping[str, tuple[int, ...]]
    compared: Mapping[str, int]
    alone: int
    ranks: tuple[int, ...]
    buffers_only: bool = False

    @property
    def equal(self) -> bool:
        """Whether nothing differs."""
        return not self.differing

    @property
    def first(self) -> str | None:
        """The name of the first that differs."""
        return next(iter(self.differing), None)

    def __bool__(self) -> bool:
        return self.equal

    def __repr__(self) -> str:
        if self.first is not None:
            others = len(self.differing) - 1
            more = f", and {others} more" if others else ""
            usual = " (buffers only: usual between steps, as each rank sees its own batches)"
            where = describe_ranks(self.differing[self.first])
            return f"{self.first} differs: {where}{more}{usual if self.buffers_only else ''}"
        if len(self.ranks) == 1:
            return "there is only one rank: nothing to compare"
        equal = ", ".join(_count(number, kind) for kind, number in self.compared.items() if number)
        alone = f"{_count(self.alone, 'shard')} can't be compared: no two ranks hold the same" if self.alone else ""
        found = f"{describe_ranks(self.ranks)} agree: {equal}" if equal else ""
        return "; ".join(filter(None, (found, alone)))


@dataclass(frozen=True)
class SyncReport:
    """What `sync` has done, the same on every rank of the group.

    Attributes:
        src: The rank whose state all have now.
        differed: For each rank that was not as `src`: how many parameters, buffers and values of state, by kind.
        steps: The optimizer steps that each rank had done, where its optimizer counts them.
        ranks: The ranks of the group.
        warning: What could not be told, with what to type; empty in general.
    """

    src: int
    differed: Mapping[int, Mapping[str, int]]
    steps: Mapping[int, int]
    ranks: tuple[int, ...]
    warning: str = ""

    def __repr__(self) -> str:
        alike: defaultdict[str, list[int]] = defaultdict(list)
        for rank in self.differed:
            alike[self._difference(rank)].append(rank)
        lines = [f"{describe_ranks(ranks)} {'was' if len(ranks) == 1 else 'were'} {t}" for t, ranks in alike.items()]
        if not lines:
            lines = [
                f"{describe_ranks(self.ranks)} agreed already" if len(self.ranks) > 1 else "there is one rank only"
            ]
        return "; ".join([*lines, *filter(None, [self.warning])])

    def _difference(self, rank: int) -> str:
        counts = ", ".join(_count(number, kind) for kind, number in self.differed[rank].items())
        before, now = self.steps.get(rank, 0), self.steps.get(self.src, 0)
        if before == now:
            return f"different: {counts}"
        return f"{'behind' if before < now else 'ahead'}: {counts}, step {before:,} → {now:,}"


def check(*objects: Any, group: dist.ProcessGroup | None = None) -> CheckReport:
    """Compare models, and whatever else trains, between ranks. To be called on all ranks of the group.

    >>> nbdist.check(model)
    ranks 0-3 agree: 148 parameters, 12 buffers

    Without objects it compares everything that has been prepared, or registered for checkpoints.

    Compared are bytes, so NaN equals NaN. Shards are compared between ranks that hold the same (HSDP); with
    one-dimensional sharding no two ranks do, and the report says so.

    Args:
        objects: Models (plain, DDP, FSDP2), tensors or lists of them, and what has a `state_dict()`.
        group: The ranks to compare; all by default.

    Returns:
        A report that prints as one line, and is false if something differs.

    Raises:
        UsageError: Something can't be compared, or ranks were not given the same.
    """
    team = Team.of(group, "check")
    _, described = _exchange("check", objects, None, team)
    differing: dict[str, tuple[int, ...]] = {}
    kinds: set[str] = set()
    compared: Counter[str] = Counter()
    alone = 0
    for name, kind in _names(described):
        outliers, comparable = _outliers({rank: told.entries.get(name) for rank, told in described.items()})
        if comparable:
            compared[kind] += 1
        else:
            alone += 1
        if outliers:
            differing[name] = outliers
            kinds.add(kind)
    return CheckReport(differing, dict(compared), alone, team.ranks, kinds == {"buffer"})


def sync(*objects: Any, src: int | None = None, group: dist.ProcessGroup | None = None) -> SyncReport:
    """Give the state of one rank to all: for ranks that are a step apart, or that have replaced others. To be called on
    all ranks of the group.

    >>> nbdist.sync(model, optimizer, scheduler, src=0)
    rank 1 was behind: 12 parameters, 36 values of state, step 41 → 42

    Parameters, buffers and the tensors of optimizers are written in place, so all objects stay the same. Gradients are
    left alone. Of a sharded model each rank takes its shard from the replica that `src` is part of (HSDP).

    Without objects it is everything that has been prepared or registered for checkpoints, and the next iteration over a
    prepared loader goes on behind the batch of the last optimizer step.

    Args:
        objects: Models (plain, DDP, FSDP2), tensors or lists of them, and what has `state_dict()` and
            `load_state_dict()`, as optimizers, schedulers and GradScaler.
        src: The rank whose state is right, as `torch.distributed.get_rank()` numbers it; None: the lowest of those
            that have made the most optimizer steps, and have not just replaced another.
        group: The ranks that take part; all by default.

    Returns:
        What differed. It prints as one line.

    Raises:
        UsageError: Nothing has changed: shards that have no replica belong to different steps, an argument is wrong, or
            ranks were not given the same. The text says what to type.
    """
    report = take_state(*objects, src=src, group=group)
    if isinstance(report, TornShards):
        raise UsageError(f"{report.text}: {report.advice}")
    return report


def take_state(*objects: Any, src: int | None, group: dist.ProcessGroup | None) -> SyncReport | TornShards:
    """Do as `sync`, but return it if the ranks lack shards of one step, with nothing changed."""
    team = Team.of(group, "sync")
    if src is not None and src not in team.ranks:
        raise UsageError(f"src={src!r} is not one of {describe_ranks(team.ranks)}: pass src={team.ranks[0]}")
    if not objects:
        rewind_loaders()
    parts, described = _exchange("sync", objects, src, team)
    _refuse_other_models(described)
    src = _source(described, src)
    if (torn := _torn_shards(described, src)) is not None:
        return torn
    warning = _warn_of_unknown_steps(described, src)
    plan = {name: _takers(name, described, src) for name, _ in _names(described)}
    for part in parts:
        part.receive({name: takers for name, takers in plan.items() if takers}, described, src, team)
    active_training.newcomer = False
    steps = {rank: told.steps for rank, told in described.items() if told.steps is not None}
    return SyncReport(src, _differences(described, plan), steps, team.ranks, warning)


def _exchange(function: str, objects: Any, src: int | None, team: Team) -> tuple[list[Argument], dict[int, Described]]:
    """Describe the arguments and hear the other ranks' descriptions. What is wrong on one rank raises on all."""
    parts, mine = describe(function, objects, src)
    described = dict(zip(team.ranks, gather(mine, team.group), strict=True))
    told = described.values()
    refuse_failures([each.failure for each in told], team.ranks)
    refuse_differing(function, [", ".join(each.labels) for each in told], ranks=team.ranks)
    refuse_differing(function, [f"src={each.src}" for each in told], ranks=team.ranks)
    return parts, described


def _names(described: Mapping[int, Described]) -> Iterator[tuple[str, str]]:
    """Yield all names that some rank has, with their kinds."""
    kinds: dict[str, str] = {}
    for told in described.values():
        for name, entry in told.entries.items():
            kinds.setdefault(name, entry.kind)
    return iter(kinds.items())


def _outliers(entries: Mapping[int, Entry | None]) -> tuple[tuple[int, ...], bool]:
    """Return the ranks that differ from most others with the same shard, and whether there were any to compare."""
    usual = next(entry.shard for entry in entries.values() if entry is not None)
    shards: defaultdict[Any, dict[int, bytes]] = defaultdict(dict)
    for rank, entry in entries.items():
        shards[entry.shard if entry else usual][rank] = entry.digest if entry else b""
    outliers: list[int] = []
    for digests in shards.values():
        counts = Counter(digests.values())  # in the order of ranks, so the lowest wins among equals
        most = max(counts, key=counts.__getitem__)
        outliers += [rank for rank, digest in digests.items() if digest != most]
    return tuple(sorted(outliers)), any(len(digests) > 1 for digests in shards.values())


def _takers(name: str, described: Mapping[int, Described], src: int) -> dict[int, int]:
    """Return the ranks that need this tensor or value from another, and from which."""
    original = described[src].entries.get(name)
    takers = {}
    for rank, told in described.items():
        mine = told.entries.get(name)
        place = mine or _parameter_of(name, told)
        source = src
        if original is not None and place is not None and original.shard is not None:
            source = next(mate for mate in original.mates if _shard(name, described[mate]) == place.shard)
        theirs = described[source].entries.get(name)
        if (mine and mine.digest) != (theirs and theirs.digest):
            takers[rank] = source
    return takers


def _shard(name: str, told: Described) -> tuple[int, ...] | None:
    entry = told.entries.get(name) or _parameter_of(name, told)
    return entry.shard if entry is not None else None


def _parameter_of(state: str, told: Described) -> Entry | None:
    """Return the parameter that a value of an optimizer's state belongs to, and is sharded like; None for others."""
    entries = told.entries.items()
    return next((entry for name, entry in entries if entry.kind == "parameter" and f".{name}." in state), None)


def _differences(
    described: Mapping[int, Described], plan: Mapping[str, Mapping[int, int]]
) -> dict[int, dict[str, int]]:
    found: defaultdict[int, Counter[str]] = defaultdict(Counter)
    for name, kind in _names(described):
        for rank in plan[name]:
            found[rank][kind] += 1
    return {rank: dict(found[rank]) for rank in sorted(found)}


def _refuse_other_models(described: Mapping[int, Described]) -> None:
    """Raise an error unless parameters and buffers match everywhere; state may still be missing on some ranks."""
    first, *others = described
    for name, kind in _names(described):
        expected = described[first].entries.get(name)
        for rank in others:
            entry = described[rank].entries.get(name)
            sharded = all(known is not None and known.shard is not None for known in (expected, entry))
            if (kind == "value of state" and not sharded) or (expected and expected.form) == (entry and entry.form):
                continue
            raise UsageError(
                f"ranks hold different models: {name} is {expected.form if expected else 'missing'} on rank {first}, "
                f"{entry.form if entry else 'missing'} on rank {rank}. Build the same model and optimizer on all "
                "ranks, or name those that have the same with group="
            )


def _source(described: Mapping[int, Described], src: int | None) -> int:
    """Return the rank whose state is taken.

    Raises:
        UsageError: It is one that has just replaced a dead rank, and so has nothing to give.
    """
    settled = [rank for rank, told in described.items() if not told.newcomer] or list(described)
    best = max(settled, key=lambda rank: (_replica(described, rank) <= set(settled), described[rank].steps or 0, -rank))
    if src is not None and src not in settled:
        raise UsageError(f"rank {src} has just replaced one that died, so its state is new: pass src={best}")
    return best if src is None else src


def _torn_shards(described: Mapping[int, Described], src: int) -> TornShards | None:
    """Return in how far the shards of the replica copied to all belong to different steps, None if they don't."""
    replica = _replica(described, src)
    strangers = replica - described.keys()
    if strangers:
        raise UsageError(f"the group leaves out {describe_ranks(strangers)}, with shards of the model: pass no group=")
    steps = {rank: described[rank].steps for rank in sorted(replica)}
    new = [rank for rank in steps if described[rank].newcomer]  # a fact, where optimizers such as SGD count no steps
    if len(replica) < 2 or (len(set(steps.values())) == 1 and not new):
        return None
    told = ", ".join(f"rank {rank} has done {_count(count or 0, 'step')}" for rank, count in steps.items())
    if len(set(steps.values())) == 1:
        told = f"{describe_ranks(new)} {'has' if len(new) == 1 else 'have'} just replaced others"
    whole = [rank for rank in described if _is_whole(described, rank)]
    furthest = max(whole, key=lambda rank: described[rank].steps or 0, default=None)
    advice = (
        f"pass src={furthest}: its replica is whole"
        if furthest is not None
        else "load a checkpoint on all ranks: `nbdist.load_state(path)`, or torch.distributed.checkpoint.load"
    )
    return TornShards(f"each of these ranks holds shards that no other has, and {told}", advice)


def _is_whole(described: Mapping[int, Described], rank: int) -> bool:
    replica = [described[mate] for mate in _replica(described, rank)]
    return len({mate.steps for mate in replica}) == 1 and not any(mate.newcomer for mate in replica)


def _warn_of_unknown_steps(described: Mapping[int, Described], src: int) -> str:
    replica = _replica(described, src)
    if len(replica) < 2 or all(described[rank].steps is not None for rank in replica):
        return ""
    return "without the optimizer, shards of different steps would go unnoticed: pass it, too"


def _replica(described: Mapping[int, Described], rank: int) -> set[int]:
    """Return the ranks whose shards make up the model that `rank` holds a part of."""
    return {mate for entry in described[rank].entries.values() if entry.shard is not None for mate in entry.mates}


def _count(number: int, thing: str) -> str:
    singular, _, rest = thing.partition(" ")
    return f"{number:,} {singular if number == 1 else singular + 's'}{' ' + rest if rest else ''}"
