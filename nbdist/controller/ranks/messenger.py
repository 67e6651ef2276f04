"""Sends for a set of ranks: to its processes by their lanes, to the agents of its nodes, and to the notebook."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from nbdist.controller.base.message_router import MessageRouter
from nbdist.controller.base.rank_order import Rank
from nbdist.controller.cells.cell_transfers import CellTransfers
from nbdist.controller.nodes.node_table import NodeTable
from nbdist.controller.nodes.roster import Roster
from nbdist.wire.base.message import Message
from nbdist.wire.frames import encode
from nbdist.wire.lanes import RANK_LANES, lane
from nbdist.wire.messages.cells import Reply
from nbdist.wire.messages.output import Credit
from nbdist.wire.questions.questions import Ask


class Messenger:
    """The `Outbox` of a set of ranks.

    Args:
        roster: The ranks.
        transfers: Brings what the values of cells lie in.
        nodes: To send to agents by.
        router: To send to ranks by.
        tell: Gives the notebook a message.
    """

    def __init__(
        self,
        roster: Roster,
        transfers: CellTransfers,
        nodes: NodeTable,
        router: MessageRouter,
        tell: Callable[[Message], None],
    ) -> None:
        self._roster = roster
        self._transfers = transfers
        self._nodes = nodes
        self._router = router
        self._tell = tell

    def to_rank(self, lane: str, rank: int, message: Message) -> None:
        """Send to the newest process of a rank, if it lives."""
        present = self._roster.present(rank)
        if present is not None and not present.dead:
            self._router.send(self._lane(lane, present), message)

    def to_ranks(self, lane: str, ranks: Sequence[int], message: Message) -> None:
        """Send the same to ranks, as far as they live; once to each node."""
        present = [found for rank in ranks if (found := self._roster.present(rank)) is not None and not found.dead]
        self._router.forward_to_all([self._lane(lane, found) for found in present], encode(message))

    def to_agent_of(self, rank: int, message: Message) -> None:
        """Send to the agent of the node that a rank is on, which knows it by its slot."""
        where = self._roster.where
        if rank not in where.ranks:
            return
        if isinstance(message, Credit):
            message = msgspec.structs.replace(message, rank=where.slot_of(rank))
        elif isinstance(message, Ask):
            message = msgspec.structs.replace(message, ranks=[where.slot_of(rank)])
        self._nodes.send(where.node_of(rank), message)

    def to_notebook(self, message: Message) -> None:
        """Send to the notebook. What a value of another node lies in is brought here first."""
        if isinstance(message, Reply):
            self._transfers.collect(message, self._roster.where.node_of(message.rank), self._tell)
        else:
            self._tell(message)

    def forget_lanes(self, rank: Rank) -> None:
        """Forget the lanes of a process that has ended."""
        self._router.drop(self._lane(name, rank) for name in RANK_LANES)

    def _lane(self, name: str, rank: Rank) -> bytes:
        return lane(name, self._roster.incarnation, rank.slot, rank.life)
