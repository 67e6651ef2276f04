"""Which ranks there are: the process of each, the node it is on, and which of them live and run something.

Independent of sockets, and of what ranks run.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

from nbdist.base.limits import Slack
from nbdist.base.ranks import RankNames
from nbdist.controller.base.rank_order import Rank
from nbdist.controller.nodes.placement import Machines, Placement
from nbdist.wire.messages.life import RankInfo, StartOptions

MakeRank = Callable[[int, int, int, set[int]], Rank]  # number, slot, life, names


class Roster:
    """The ranks of a set.

    Args:
        incarnation: The number of the set among all that the controller starts.
        shares: By node, what is to be started there.
        nodes: Those that have not been lost.
        make: Makes the state of a rank's process.
        travel: Returns the longest round trip to any node, in seconds.

    Attributes:
        where: The node that each rank is on.
        ranks: By number.
        newcomers: Processes that have not taken the places of their ranks yet, by rank.
        apart: Newcomers that are being set up, and share no group with others yet.
        up, up_at: Whether all are ready, and since when, in seconds since the epoch.
        ending: Whether they are to end.
        backend: Of their default process group; "none" without one.
        vacant: Nodes on which no process of the set is left.
    """

    def __init__(
        self,
        incarnation: int,
        shares: Mapping[int, StartOptions],
        nodes: Machines,
        make: MakeRank,
        travel: Callable[[], float],
    ) -> None:
        self.incarnation = incarnation
        self.where = Placement(shares, nodes)
        self._travel = travel
        self._make = make
        self._answer_slack = shares[0].slack
        self.ranks = {number: self._new(number, 0) for number in self.where.ranks}
        self.newcomers: dict[int, Rank] = {}
        self.apart: Collection[int] = ()
        self.up, self.up_at, self.ending = False, 0.0, False
        self.backend = ""
        self.vacant: set[int] = set()

    def _new(self, number: int, life: int) -> Rank:
        return self._make(number, self.where.slot_of(number), life, {self.where.post(number).rank})

    # --- who is there

    def present(self, rank: int) -> Rank | None:
        """Return the newest process in a rank's place; None if there is no such rank."""
        return self.newcomers.get(rank) or self.ranks.get(rank)

    def sender(self, slot: int, life: int) -> Rank | None:
        """Return the rank whose lanes have these numbers; None if that process has ended, and its place was taken."""
        rank = self.where.rank_in(slot)
        present = self.present(rank) if rank is not None else None
        return present if present is not None and present.life == life else None

    def on_node(self, node: int, rank: int) -> Rank:
        """Return the newest process of a rank, for which a node speaks.

        Raises:
            ValueError: The rank is on another node, or has no process.
        """
        if not self.where.is_on(rank, node):
            raise ValueError(f"node {node} speaks for rank {rank}, which is on another")
        found = self.present(rank)
        if found is None:
            raise ValueError(f"rank {rank} has no process")
        return found

    def idle(self) -> list[int]:
        """Return the living ranks that run nothing."""
        return [rank.rank for rank in self.ranks.values() if not rank.dead and not rank.serial]

    def busy(self) -> set[int]:
        """Return the living ranks that run something."""
        return {rank.rank for rank in self.ranks.values() if not rank.dead and rank.serial}

    def lives(self, rank: int) -> bool:
        """Return whether there is such a rank, and it lives."""
        return rank in self.ranks and self.ranks[rank].dead is None

    def living(self) -> list[int]:
        """Return the ranks that live."""
        return [rank.rank for rank in self.ranks.values() if rank.dead is None]

    def dead(self) -> list[int]:
        """Return the ranks that have died."""
        return [rank.rank for rank in self.ranks.values() if rank.dead]

    def everyone(self) -> list[int]:
        """Return all ranks, including dead ones."""
        return list(self.ranks)

    def are_apart(self, ranks: Sequence[int]) -> bool:
        """Return whether these are newcomers that share no group with others yet."""
        return bool(self.apart) and set(ranks).issubset(self.apart)

    def infos(self) -> list[RankInfo]:
        """Return the ranks as the notebook sees them."""
        return [self.where.info(rank) for rank in self.ranks.values()]

    @property
    def all_gone(self) -> bool:
        """Whether no process is left anywhere."""
        return self.vacant >= self.where.shares.keys()

    @property
    def names(self) -> RankNames:
        """How to name ranks."""
        return self.where.names

    @property
    def slack(self) -> Slack:
        """What waits for these ranks are longer by."""
        travel = self._travel()
        return Slack(travel, max(travel, self._answer_slack))

    # --- changes

    def add_newcomer(self, rank: int) -> Rank:
        """Make place for a new process of a dead rank, or of one that is added. Returns its state."""
        newcomer = self.newcomers[rank] = self._new(rank, self.where.next_life(rank))
        return newcomer

    def settle(self) -> bool:
        """Have the newcomers take their places. Returns whether they are more ranks, which are to be renumbered."""
        self.ranks |= self.newcomers
        self.newcomers = {}
        if not self.where.growing:
            return False
        self.where.take_in()
        return True

    def renumber(self, numbers: Mapping[int, int]) -> None:
        """Know ranks by other numbers, which are given by their old ones; those without one are gone."""
        self.ranks = {number: self.ranks[rank] for rank, number in sorted(numbers.items(), key=lambda pair: pair[1])}
        for number, rank in self.ranks.items():
            rank.renumber(number)
