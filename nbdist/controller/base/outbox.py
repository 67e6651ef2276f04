"""How the parts of the controller send: to ranks, to the agents of their machines, and to the notebook."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from nbdist.wire.base.message import Message


class Outbox(Protocol):
    """Where messages leave. `lane` is one of a rank's lanes; what is sent to a rank that has died is dropped."""

    def to_rank(self, lane: str, rank: int, message: Message) -> None:
        """Send to the newest process of a rank."""

    def to_ranks(self, lane: str, ranks: Sequence[int], message: Message) -> None:
        """Send the same to ranks; once to each node."""

    def to_agent_of(self, rank: int, message: Message) -> None:
        """Send to the agent of the node that a rank is on."""

    def to_notebook(self, message: Message) -> None:
        """Send to the notebook."""
