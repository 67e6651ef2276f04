"""What it takes to change who the ranks of a set are: to fork newcomers, to give ranks other numbers, to forget some.

`replacement` decides when each of these is done.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from nbdist.controller.base.outbox import Outbox
from nbdist.controller.base.rank_order import Rank
from nbdist.controller.cells.cell_history import CellHistory
from nbdist.controller.cells.running_cells import Cells
from nbdist.controller.nodes.roster import Roster
from nbdist.wire.lanes import RANK_CELL
from nbdist.wire.messages.healing import EndRanks, Renumbered, Resize, Respawn
from nbdist.wire.messages.life import RankInfo, StartOptions


class Membership:
    """Who the ranks are.

    Args:
        roster: The ranks.
        outbox: Sends to them.
        cells: What they run.
        prepare: Has a node prepare what newcomers are forked from: one that has come since the start.
        forget_lanes: Forgets those of a process that has ended.

    Attributes:
        history: What has run on the ranks so far.
    """

    def __init__(
        self,
        roster: Roster,
        outbox: Outbox,
        cells: Cells,
        prepare: Callable[[int, StartOptions], None],
        forget_lanes: Callable[[Rank], None],
    ) -> None:
        self.roster = roster
        self.outbox = outbox
        self.cells = cells
        self.history = CellHistory()
        self._prepare = prepare
        self._forget_lanes = forget_lanes

    def move(self, lost: int, node: int) -> None:
        """Note that a node has come in place of a lost one."""
        self.roster.where.move(lost, node)
        self.roster.vacant.add(node)  # until newcomers are forked there

    def open(self, node: int) -> None:
        """Make ready for ranks on a node that has just come."""
        self.roster.where.open(node, self.roster.backend)
        self.roster.vacant.add(node)

    def fork(self, rank: int) -> None:
        """Have a new process forked for a dead rank, or for one that is added."""
        roster = self.roster
        if rank in roster.ranks:
            self._forget_lanes(roster.ranks[rank])
        newcomer, node = roster.add_newcomer(rank), roster.where.node_of(rank)
        if node in roster.vacant:
            roster.vacant.discard(node)
            self._prepare(node, roster.where.share_of(node))
        message = Respawn(roster.incarnation, newcomer.slot, newcomer.life, roster.where.post(rank))
        self.outbox.to_agent_of(rank, message)

    def end_rank(self, rank: int) -> None:
        """End the process of a rank by force."""
        slot = self.roster.where.slot_of(rank)
        self.outbox.to_agent_of(rank, EndRanks(self.roster.incarnation, [slot]))

    def settle(self) -> list[RankInfo]:
        """Have the newcomers take their places; if they are more ranks, all have their new numbers then."""
        newcomers = list(self.roster.newcomers.values())
        if self.roster.settle():
            self._take_numbers(self.roster.where.numbers)
        return [self.roster.where.info(rank) for rank in newcomers]

    def resize(self, numbers: Mapping[int, int], group: str) -> None:
        """Have the ranks that stay take their numbers, which are given by their old ones, and another default group."""
        ranks = self.roster.ranks.values()
        for rank in [rank for rank in ranks if rank.rank not in numbers and rank.dead is not None]:
            self._forget_lanes(rank)
        if any(rank.dead is not None for rank in ranks):
            self.roster.where.renumber(numbers)
            self.cells.forget_dead()
            self._take_numbers(numbers)
        for number in numbers.values():
            self.outbox.to_rank(RANK_CELL, number, Resize(self.roster.where.post(number), dict(numbers), group))

    def dismiss(self, ranks: Sequence[int]) -> None:
        """Forget ranks that were to be more, and could not be."""
        for rank in ranks:
            if (found := self.roster.ranks.pop(rank, None)) is not None:
                self._forget_lanes(found)
        as_before = {rank: number for number, rank in enumerate(sorted(self.roster.ranks))}
        self.roster.where.renumber(as_before)
        self._take_numbers(as_before)

    def _take_numbers(self, numbers: Mapping[int, int]) -> None:
        """Know ranks by other numbers; those without one are gone."""
        self.roster.renumber(numbers)
        self.cells.renumber(numbers)
        self.history.renumber(numbers)
        self.outbox.to_notebook(Renumbered(dict(numbers), self.roster.infos()))
