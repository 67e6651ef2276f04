"""Compares whether all ranks' process groups are in step, and if not, brings them back in step: after a failed cell,
and before a cell that may use groups that could not be compared then.

Compares the ranks' answers, decides, sends each rank its orders, and describes what was done. Independent of torch,
sockets and the notebook.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

from nbdist.base import limits
from nbdist.base.limits import NO_SLACK, Slack
from nbdist.base.ranks import describe_ranks
from nbdist.controller.base.inquiries import AskRanks
from nbdist.wire.base.rank_spans import RankSpans
from nbdist.wire.messages.cells import InOrder, Recover
from nbdist.wire.questions.question import NoAnswer
from nbdist.wire.questions.stopping import GetState, RankState


@dataclass
class GroupRepairs:
    """What has to be done, by group name."""

    renew: list[str] = field(default_factory=list)
    stale: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    owed: dict[str, RankSpans] = field(default_factory=dict)  # with their members: to be renewed when all are idle
    count: int = 0
    uneven: bool = False  # ranks numbered groups differently
    reset: bool = False

    @property
    def needed(self) -> bool:
        """Whether there is anything to do."""
        return bool(self.renew or self.stale or self.lost or self.uneven or self.reset)


@dataclass(frozen=True)
class FailedCell:
    """A failed cell, or one that caught the error of a collective that broke a group.

    Attributes:
        serial: The cell; if none failed, the one about to begin.
        ranks: Where it ran.
        failed: The ranks that failed, or whose groups broke.
        caught: Whether the cell caught the error on all of them, and ended well.
    """

    serial: int
    ranks: Collection[int] = ()
    failed: Collection[int] = ()
    caught: bool = False


def compare_groups(
    states: Mapping[int, RankState],
    idle: Collection[int],
    dead: Collection[int],
    known_lost: Collection[str],
    cell: FailedCell,
    newcomers: Collection[int] = (),
) -> GroupRepairs:
    """Compare where ranks are and return what has to be done.

    Args:
        states: The answers, by rank.
        idle: Those of them that run nothing. A rank that is neither here nor dead is busy, or late with its answer.
        dead: Ranks that have died.
        known_lost: Groups that were lost before.
        cell: The failed cell.
        newcomers: Ranks that take the places of dead ones, and have no group yet.
    """
    found = GroupRepairs()
    free = {*idle, *newcomers}
    groups: dict[str, RankSpans] = {}
    for state in states.values():
        for name, group in state.groups.items():
            groups.setdefault(name, group.members)
    for name, members in groups.items():
        if set(members) & set(dead):
            if name not in known_lost:
                found.lost.append(name)
        elif free.issuperset(members) and not set(members).isdisjoint(newcomers):
            found.renew.append(name)
        elif free.issuperset(members):
            _judge(found, name, members, states, cell)
        elif not _untouched(name, members, states, cell):
            found.owed[name] = members
    compared = [states[rank] for rank in idle]
    counts = {state.count for state in compared}
    found.count, found.uneven = max(counts, default=0), len(counts) > 1
    found.reset = (bool(found.renew) and not cell.caught) or any(state.caught for state in compared)
    return found


def _judge(
    found: GroupRepairs, name: str, members: RankSpans, states: Mapping[int, RankState], cell: FailedCell
) -> None:
    present = [states[rank].groups[name] for rank in members if name in states[rank].groups]
    if len(present) < len(members):
        found.stale.append(name)
        return
    # Stages of a pipeline exchange different numbers of messages in a step, but after the same one all have arrived.
    even = _stopped_together(members, states) or len({tuple(group.entered) for group in present}) == 1
    if any(group.cut for group in present) or not even or not _known(members, states, cell):
        found.renew.append(name)


def _stopped_together(members: RankSpans, states: Mapping[int, RankState]) -> bool:
    """Return whether all these ranks were stopped after the same step."""
    stopped = {states[rank].stopped for rank in members}
    return len(stopped) == 1 and None not in stopped


def _untouched(name: str, members: RankSpans, states: Mapping[int, RankState], cell: FailedCell) -> bool:
    """Return whether the cell left a group alone, as far as is known without members that are busy or late."""
    present = [state.groups[name] for rank in members if (state := states.get(rank)) and name in state.groups]
    if any(group.cut for group in present):
        return False
    if not set(members) & set(cell.failed):
        return True
    return _known(members, states, cell) and not any(any(group.entered) for group in present)


def _known(members: RankSpans, states: Mapping[int, RankState], cell: FailedCell) -> bool:
    """Return whether it is known what the cell did in a group if it failed on one of its members.

    A rank that has since begun another cell can no longer report what it entered in this one.
    """
    if not set(members) & set(cell.failed):
        return True
    return all(rank in states and states[rank].current for rank in set(members) & set(cell.ranks))


class Recovery:
    """One comparison of ranks, and its consequences.

    A rank that does not answer in time is `late`; the comparison stays open for it until `go_on` is called.

    Args:
        cell: The failed cell.
        idle: The relevant living ranks that run nothing.
        busy: Ranks on which the cell failed and that already run another.
        dead: Ranks that have died.
        generation: The current generation of the process groups.
        lost: Groups that were lost before.
        regroup: Whether to make the default group again, replacing all existing groups.
        slack: What waits for the ranks are longer by.
        newcomers: Ranks that take the places of dead ones.

    Attributes:
        began: When it began.
        due: Time of the next `tick`; None if only late ranks are waited for.
        late: Ranks that have not answered in time.
        done: Whether it is finished; then all attributes are final.
        lost: Groups that are lost for good.
        owed: Groups still to be renewed, with their members: those may be out of step.
        settled: Groups that need nothing more.
        missing: Ranks that were told to renew groups and have not done so.
        renewed: Groups that were renewed.
        failure: Why groups could not be renewed; "" if they were.
        notes: What was done besides.
    """

    def __init__(
        self,
        cell: FailedCell,
        idle: Sequence[int],
        busy: Sequence[int],
        dead: Sequence[int],
        generation: int,
        lost: Sequence[str],
        now: float,
        *,
        regroup: bool = False,
        slack: Slack = NO_SLACK,
        newcomers: Sequence[int] = (),
    ) -> None:
        self.generation = generation
        self.text = ""
        self.step = 0
        self.done = not idle and not busy
        self.lost = list(lost)
        self.owed: dict[str, RankSpans] = {}
        self.settled: set[str] = set()
        self.late: set[int] = set()
        self.missing: set[int] = set()
        self.renewed: list[str] = []
        self.failure = ""
        self.notes = ""
        self.began = now
        self.due: float | None = now + limits.COMPARE + slack.answers
        self._slack = slack
        self._cell = cell
        self._regroup = regroup
        self._newcomers = list(newcomers)
        free = set(idle)
        self._ranks = [rank for rank in cell.ranks if rank in free]
        self._idle = list(idle)
        self._busy = list(busy)
        self._left = {*idle, *busy}  # have not answered; once it is decided: not carried out their orders
        self._dead = list(dead)
        self._states: dict[int, RankState] = {}
        self._repairs: GroupRepairs | None = None
        self._reports: dict[int, InOrder] = {}

    def begin(self, ask: AskRanks, tell: Callable[[Sequence[int], Recover], None]) -> None:
        """Ask the ranks where they are.

        Args:
            ask: Asks control threads.
            tell: Sends a Recover to ranks' main threads; their reports arrive through `in_order`.
        """
        self._tell = tell
        if not self.done:
            ask(self._idle + self._busy, GetState(self._cell.serial), self.answered)

    @property
    def open(self) -> bool:
        """Whether late ranks keep it from being decided."""
        return self._repairs is None and bool(self.late)

    @property
    def awaited(self) -> set[int]:
        """Ranks that have not answered, or not carried out their orders."""
        return set(self._left)

    def answered(self, rank: int, state: RankState | NoAnswer, now: float) -> None:
        """Handle a rank's report of where it is, or why it can't report."""
        if self._repairs is not None:
            return
        if isinstance(state, NoAnswer):
            self._forget(rank)
        else:
            self._states[rank] = state
            self._left.discard(rank)
        self.late.discard(rank)
        self._decide_if_all_have_answered(now)

    def in_order(self, rank: int, report: InOrder) -> None:
        """Note that a rank has carried out its orders."""
        self._reports[rank] = report
        self._left.discard(rank)
        if not self._left:
            self._conclude()

    def died(self, rank: int, now: float) -> None:
        """Handle the death of a rank."""
        if rank in self._dead:
            return
        self._forget(rank)
        self._states.pop(rank, None)
        self.late.discard(rank)
        self._dead.append(rank)
        if self._repairs is None:
            self._decide_if_all_have_answered(now)
        elif not self._left:
            self._conclude()

    def tick(self, now: float) -> None:
        """Do what is due at this time."""
        if self.done or self.due is None or now < self.due:
            return
        if self._repairs is None:
            self.due = None
            self.late = self.awaited
            needed = self._newcomers or not self.late.isdisjoint(self._cell.ranks)
            if not needed and not self._compared().owed:
                self.late = set()  # their answers would make no difference
                self.go_on(now)
        else:
            self.missing = self.awaited
            self._conclude()

    def go_on(self, now: float) -> None:
        """Decide without the late ranks, which must not run anything before they know the decision."""
        for rank in self.awaited:
            self._forget(rank)
        self._decide(now)

    def _forget(self, rank: int) -> None:
        self._left.discard(rank)
        self._idle = [other for other in self._idle if other != rank]
        self._busy = [other for other in self._busy if other != rank]
        self._newcomers = [other for other in self._newcomers if other != rank]

    def _compared(self) -> GroupRepairs:
        if self._regroup:
            return GroupRepairs()
        idle = [rank for rank in self._idle if rank in self._states]
        return compare_groups(self._states, idle, self._dead, self.lost, self._cell, self._newcomers)

    def _decide_if_all_have_answered(self, now: float) -> None:
        if not self._left:
            self._decide(now)

    def _decide(self, now: float) -> None:
        stopped = {self._states[rank].stopped for rank in self._ranks if rank in self._states}
        self._repairs = found = self._compared()
        self._left = {*self._idle, *self._newcomers}
        if not found.renew and len(stopped) == 1:
            self.step = next(iter(stopped)) or 0
        self.owed = dict(found.owed)
        if not (found.needed or self._regroup or self._newcomers) or not self._idle:
            self._conclude()
            return
        if found.renew or self._regroup:
            self.generation += 1
        self.lost = [name for name in self.lost if name not in found.renew] + found.lost
        self.due = now + limits.RENEW + 10 * self._slack.travel  # groups are made in several round trips
        self._tell(
            [*self._idle, *self._newcomers],
            Recover(
                self._cell.serial,
                self.generation,
                found.renew,
                found.stale,
                found.lost,
                self._dead,
                found.count,
                found.reset or bool(self._newcomers),  # their models and those of the others must begin alike
                [*self._idle, *self._newcomers],
                self._regroup,
                max((state.lifetime for state in self._states.values()), default=0),
            ),
        )

    def _conclude(self) -> None:
        self.done = True
        found = self._repairs or GroupRepairs()
        parts = []
        failures = sorted({report.failure for report in self._reports.values() if report.failure})
        if self.missing:
            self.failure = f"{describe_ranks(sorted(self.missing))} did not join to rebuild the process groups"
            parts.append(f"{self.failure}; `%distributed restart`")
        elif failures:
            self.failure = f"process groups could not be renewed ({failures[0]})"
            parts.append(f"{self.failure}: `%distributed restart`")
        elif found.renew:
            self.renewed = found.renew
            why = ", because the cell caught an error that had broken them" if self._cell.caught else ""
            parts.append(f"process groups rebuilt (generation {self.generation}){why}")
        elif self._regroup:
            parts.append("the default process group, which a cell had destroyed, was recreated")
        if self.failure:
            self.owed |= {name: self._members(name) for name in found.renew}
        self.settled = {*found.renew, *found.stale, *found.lost} - self.owed.keys()
        rest = []
        if any(report.gradients for report in self._reports.values()):
            rest.append("gradients of the interrupted step dropped")
        for note in dict.fromkeys(note for report in self._reports.values() for note in report.notes):
            rest.append(note)
        if found.stale:
            rest.append("groups that existed on only some of their ranks were dropped: create them again")
        if found.owed:
            rest.append(self._postponed(found.owed))
        apart = self._apart()
        if apart:
            rest.append(apart)
        self.notes = "; ".join(rest)
        self.text = "; ".join(parts + rest)

    def _members(self, name: str) -> RankSpans:
        return next(state.groups[name].members for state in self._states.values() if name in state.groups)

    def _postponed(self, owed: Mapping[str, Collection[int]]) -> str:
        """Describe what happens to groups that can't be renewed yet."""
        who = describe_ranks(set().union(*owed.values()) - set(self._idle))
        return (
            f"process groups shared with {who} may be out of step; "
            f"they are rebuilt before the next cell that starts with {who} idle"
        )

    def _apart(self) -> str:
        """Describe which ranks made more steps than others in this cell, and what to type."""
        states = {rank: self._states[rank] for rank in self._ranks if rank in self._states}
        by_count: dict[int, list[int]] = {}
        for rank, state in states.items():
            by_count.setdefault(state.steps, []).append(rank)
        if len(by_count) < 2:
            return self._between_schedules(states)
        words = "; ".join(f"{describe_ranks(by_count[count])}: {count:,}" for count in sorted(by_count, reverse=True))
        ahead = by_count[max(by_count)][0]
        return (
            f"ranks have made different numbers of steps ({words}): "
            f"`nbdist.sync(model, optimizer, src={ahead})` on all ranks gives them the same state"
        )

    def _between_schedules(self, states: Mapping[int, RankState]) -> str:
        """Describe which ranks have set the learning rate of the next step, if only some have, and what to type."""
        done = [rank for rank, state in states.items() if state.rescheduled]
        if not done or len(done) == len(states):
            return ""
        others = describe_ranks(sorted(states.keys() - set(done)))
        return (
            f"the learning rate of the next step is set on {describe_ranks(done)}, not on {others}: "
            f"`nbdist.sync(optimizer, scheduler, src={done[0]})` on all ranks gives them the same state"
        )
