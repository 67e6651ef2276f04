"""What is repaired between cells, and which cells must wait for it.

Runs one recovery after each failed cell. Groups that could not be compared then are owed: they may not be used, and
are renewed before the next cell that starts while all their ranks are idle. A cell waits for ranks that have yet to
report whether their groups are in step, or to learn that they are not: a late answer costs time, never a wrong sum.
Handles messages, not sockets.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from nbdist.controller.base.inquiries import AskRanks
from nbdist.controller.base.outbox import Outbox
from nbdist.controller.cells.recovery import FailedCell, Recovery
from nbdist.controller.cells.waiting_cells import WaitingCell, WaitingCells
from nbdist.controller.nodes.roster import Roster
from nbdist.wire.base.message import Message
from nbdist.wire.lanes import RANK_CELL
from nbdist.wire.messages.cells import Execute, InOrder, Recover, Recovered, Remark
from nbdist.wire.questions.question import NoAnswer
from nbdist.wire.questions.stopping import Forbid, Forbidden


@dataclass
class _Repair:
    """A recovery in progress: after a failed cell, or before one that is about to begin.

    Attributes:
        last: The message that ends the failed cell, until it is sent.
        groups: The groups being renewed for a cell that is about to begin.
        over: Called at its end, if it is for newcomers.
    """

    serial: int
    recovery: Recovery
    last: Message | None = None
    groups: frozenset[str] = frozenset()
    over: Callable[[Recovery], None] | None = None


class Repairs:
    """All repairs of a set of ranks.

    Args:
        roster: The ranks.
        outbox: Sends to them.
        ask: Asks control threads.
        waiting: Cells that have not begun.
        retry: Called when cells that waited for repairs may begin.

    Attributes:
        generation: Of the process groups.
    """

    def __init__(
        self, roster: Roster, outbox: Outbox, ask: AskRanks, waiting: WaitingCells, retry: Callable[[], None]
    ) -> None:
        self._roster = roster
        self._outbox = outbox
        self._ask = ask
        self._waiting = waiting
        self._retry = retry
        self.generation = 1
        self._over: deque[tuple[FailedCell, Message | None]] = deque()  # waiting for their recovery
        self._repair: _Repair | None = None
        self._lost: list[str] = []  # groups lost to a death
        self._owed: dict[str, Collection[int]] = {}  # groups to be renewed when all their members are idle
        self._uninformed: set[int] = set()  # ranks that have yet to learn which groups they must not use
        self._missing: set[int] = set()  # ranks that have yet to carry out their orders
        self._ungrouped: set[int] = set()  # ranks that have destroyed their default group

    # --- events

    def note_group(self, rank: int, grouped: bool) -> None:
        """Note whether a rank has its default process group."""
        if grouped:
            self._ungrouped.discard(rank)
        else:
            self._ungrouped.add(rank)

    def add(self, cell: FailedCell, last: Message | None = None) -> None:
        """Add a failed cell; `go_on` and `may_begin` repair what it left.

        Args:
            last: The message that ends it, sent once everything is repaired; None if it still runs on other ranks.
        """
        self._over.append((cell, last))

    @property
    def quiet(self) -> bool:
        """Whether nothing is being repaired."""
        return self._repair is None and not self._over

    def renumber(self, numbers: Mapping[int, int]) -> None:
        """Note that ranks have other numbers, while it is `quiet`; those without one are gone."""
        whole = {name: members for name, members in self._owed.items() if numbers.keys() >= set(members)}
        self._owed = {name: [numbers[rank] for rank in members] for name, members in whole.items()}
        for known in (self._uninformed, self._missing, self._ungrouped):
            known_now = {numbers[rank] for rank in known if rank in numbers}
            known.clear()
            known.update(known_now)

    def forget_dead(self) -> None:
        """Note that nobody will take the places of those that have died."""
        self._lost = []

    def admit(self, newcomers: Sequence[int], over: Callable[[Recovery], None], now: float) -> None:
        """Bring newcomers into the groups of the dead ranks whose places they take, while it is `quiet`.

        Args:
            newcomers: They stand in for them already.
            over: Called at the end, with what was done.
        """
        idle = [rank for rank in self._roster.idle() if rank not in self._missing and rank not in newcomers]
        dead = self._roster.dead()
        recovery = Recovery(
            FailedCell(0),
            idle,
            [],
            dead,
            self.generation,
            self._lost,
            now,
            newcomers=newcomers,
            slack=self._roster.slack,
        )
        self._begin_repair(_Repair(0, recovery, over=over))
        self._end_repair(now)

    def awaited(self, message: Execute) -> set[int]:
        """Return the ranks that keep a cell from beginning."""
        if self._repair is not None:
            return self._repair.recovery.awaited
        return set(message.ranks) & (self._uninformed | self._missing)

    def let_end(self, serial: int) -> None:
        """Let a cell that failed end at once, at the user's request, though not everything is repaired."""
        if self._repair is not None and self._repair.serial == serial:
            self._release(self._repair)

    def died(self, rank: int, now: float) -> None:
        """Handle the death of a rank."""
        self._missing.discard(rank)
        self._ungrouped.discard(rank)
        if self._repair is not None:
            self._repair.recovery.died(rank, now)

    def in_order(self, rank: int, report: InOrder) -> None:
        """Note that a rank has carried out a Recover."""
        self.note_group(rank, report.grouped)
        if rank in self._missing:
            self._missing.discard(rank)  # too late: the others have given up
        elif self._repair is not None:
            self._repair.recovery.in_order(rank, report)

    def due(self) -> float | None:
        """Return the time of the next `tick`."""
        return self._repair.recovery.due if self._repair is not None else None

    def tick(self, now: float) -> None:
        """Do what is due at this time."""
        if self._repair is not None:
            self._repair.recovery.tick(now)
        self.go_on(now)

    def go_on(self, now: float) -> None:
        """End the recovery if it is finished, then begin the next one and the cells that waited for it."""
        self._end_repair(now)
        if self._repair is not None and not self._repair.recovery.open:
            return  # what waits goes on waiting; with many ranks, to find that out for each answer takes long
        self._retry()

    # --- recoveries

    def _recover(self, cell: FailedCell, last: Message | None, now: float) -> None:
        """Compare the ranks after a failed cell."""
        idle = [rank for rank in self._roster.idle() if rank not in self._missing]
        dead = self._roster.dead()
        busy = sorted(set(cell.failed) - {*idle, *dead, *self._missing})
        recovery = Recovery(cell, idle, busy, dead, self.generation, self._lost, now, slack=self._roster.slack)
        self._begin_repair(_Repair(cell.serial, recovery, last))

    def _begin_repair(self, repair: _Repair) -> None:
        self._repair = repair
        repair.recovery.begin(self._ask, self._send_recover)

    def _send_recover(self, ranks: Sequence[int], message: Recover) -> None:
        self._outbox.to_ranks(RANK_CELL, ranks, message)

    def _end_repair(self, now: float) -> None:
        while True:
            repair = self._repair
            if repair is not None and repair.recovery.open:
                self._release(repair)
                if self._over:
                    repair.recovery.go_on(now)
            if repair is not None and repair.recovery.done:
                self._repair = None
                self._note_outcome(repair)
            if self._repair is not None or not self._over:
                return
            self._recover(*self._over.popleft(), now)

    def _note_outcome(self, repair: _Repair) -> None:
        recovery = repair.recovery
        self.generation, self._lost = recovery.generation, recovery.lost
        self._missing |= recovery.missing
        settled = (recovery.settled | repair.groups) - recovery.owed.keys()
        self._owed = {name: members for name, members in (self._owed | recovery.owed).items() if name not in settled}
        self._forbid(recovery)
        if repair.over is not None:
            repair.over(recovery)
            return
        self._report(repair)

    def _report(self, repair: _Repair) -> None:
        """Report what was done: in the failed cell if it has not ended, else in the cells that waited for it."""
        recovery = repair.recovery
        waited = self._waiting.repaired_for() if recovery.text and repair.last is None else []
        seconds = time.monotonic() - recovery.began
        text = "" if waited or repair.groups else recovery.text
        self._outbox.to_notebook(Recovered(repair.serial, recovery.generation, text, recovery.step, seconds))
        for cell in waited:
            self._outbox.to_notebook(Remark(cell.serial, recovery.text, "groups"))
        self._end_failed(repair)

    def _release(self, repair: _Repair) -> None:
        """Let a failed cell end before everything is repaired."""
        if repair.last is None:
            return
        recovery = repair.recovery
        who = self._roster.names.describe(recovery.awaited)
        text = f"{who} did not answer in time: process groups are checked before the next cell there starts"
        seconds = time.monotonic() - recovery.began
        self._outbox.to_notebook(Recovered(repair.serial, self.generation, text, 0, seconds))
        self._end_failed(repair)

    def _end_failed(self, repair: _Repair) -> None:
        if repair.last is not None:
            self._outbox.to_notebook(repair.last)
            repair.last = None

    def _forbid(self, recovery: Recovery) -> None:
        """Make using groups that may be out of step an error on all their members."""
        dead = set(self._roster.dead())
        members = set().union(*recovery.owed.values()) - recovery.late - dead
        for ranks, groups in ((members, sorted(recovery.owed)), (recovery.late - dead, None)):
            if ranks:
                self._uninformed |= ranks
                self._ask(sorted(ranks), Forbid(groups), self._forbidden)

    def _forbidden(self, rank: int, answer: Forbidden | NoAnswer, now: float) -> None:
        self._uninformed.discard(rank)
        if isinstance(answer, Forbidden):
            self._owed |= answer.groups

    # --- waiting cells

    def must_wait(self, cell: WaitingCell, now: float) -> bool:
        """Return whether a cell has to wait: `retry` is called when it may begin."""
        self._end_repair(now)
        ranks = set(cell.message.ranks)
        recovery = self._repair.recovery if self._repair is not None else None
        if recovery is not None and recovery.open and not ranks & recovery.late:
            recovery.go_on(now)
            self._end_repair(now)
        if self._repair is not None or ranks & (self._uninformed | self._missing):
            return True
        return (bool(self._owed) and self._settle(cell, now)) or (
            bool(self._ungrouped) and self._make_group_again(cell, now)
        )

    def _settle(self, cell: WaitingCell, now: float) -> bool:
        """Renew the groups this cell might use, where all members are idle. False if there are none."""
        if cell.settled:
            return False
        dead = self._roster.dead()
        able = {*self._roster.idle(), *dead} - self._uninformed - self._missing
        ranks = set(cell.message.ranks)
        chosen = {
            name: members
            for name, members in self._owed.items()
            if able.issuperset(members) and not ranks.isdisjoint(members)
        }
        if not chosen:
            return False
        self._settle_for(cell, now)
        members = sorted(set().union(*chosen.values()) - set(dead))
        recovery = Recovery(
            FailedCell(cell.serial), members, [], dead, self.generation, self._lost, now, slack=self._roster.slack
        )
        self._begin_repair(_Repair(cell.serial, recovery, groups=frozenset(chosen)))
        return True

    def _settle_for(self, cell: WaitingCell, now: float) -> None:
        cell.wait_for_repairs(now)
        cell.settled = True

    def _make_group_again(self, cell: WaitingCell, now: float) -> bool:
        """Recreate the default group that cells destroyed, if this cell runs on all ranks. False if it can't be."""
        ranks = self._roster.everyone()
        if cell.settled or not set(ranks) == set(cell.message.ranks) == set(self._roster.idle()):
            return False
        self._settle_for(cell, now)
        recovery = Recovery(
            FailedCell(cell.serial),
            ranks,
            [],
            [],
            self.generation,
            self._lost,
            now,
            regroup=True,
            slack=self._roster.slack,
        )
        self._begin_repair(_Repair(cell.serial, recovery, groups=frozenset(self._owed)))
        return True
