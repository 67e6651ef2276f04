"""What parts of the controller stand on in unit tests: ranks on one node, and a place where what is sent is seen."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from nbdist.controller.base.rank_order import Rank
from nbdist.controller.nodes.node_table import KnownNode
from nbdist.controller.nodes.roster import Roster
from nbdist.wire.base.message import Message
from nbdist.wire.messages.life import Died, StartOptions


class Sent:
    """An outbox whose messages stay in it.

    Attributes:
        sent: What was sent to ranks, each with its rank.
        to_agents: What was sent to agents.
        told: What was sent to the notebook.
    """

    def __init__(self) -> None:
        self.sent: list[tuple[int, Message]] = []
        self.to_agents: list[Message] = []
        self.told: list[Message] = []

    def to_rank(self, lane: str, rank: int, message: Message) -> None:
        self.sent.append((rank, message))

    def to_ranks(self, lane: str, ranks: Sequence[int], message: Message) -> None:
        self.sent += [(rank, message) for rank in ranks]

    def to_agent_of(self, rank: int, message: Message) -> None:
        self.to_agents.append(message)

    def to_notebook(self, message: Message) -> None:
        self.told.append(message)


def roster_of(count: int, sent: Sent, shares: Mapping[int, StartOptions] | None = None) -> Roster:
    """Return ranks that are up and idle: so many on one node, or those that are given by node."""

    def make(number: int, slot: int, life: int, names: set[int]) -> Rank:
        return Rank(number, sent.told.append, lambda *_: None, lambda _: None, slot, life, names, ready=not life)

    shares = shares or {0: StartOptions(count, {}, "/", [], [], 0o022, 1024)}
    roster = Roster(1, shares, {node: KnownNode(node, f"host-{node}") for node in shares}, make, lambda: 0.0)
    roster.up = True
    return roster


def kill(roster: Roster, rank: int) -> None:
    """Note that a rank has died."""
    roster.ranks[rank].die(Died(rank, 7, -9, "", 0, 0.0))


def keep_busy(roster: Roster, *ranks: int) -> None:
    """Have these ranks, and no others, run a cell."""
    for rank in roster.ranks.values():
        rank.serial = 1 if rank.rank in ranks else 0
