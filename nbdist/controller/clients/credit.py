"""What the notebook owes the ranks: bytes passed on to it that it has not paid for yet. Pure."""

from __future__ import annotations

from collections import Counter

from nbdist.wire.base.message import Message
from nbdist.wire.messages.output import Credit, Display, Output, WidgetMessage


class Ledger:
    """An account for each rank's output, and one for its displays and widget messages."""

    def __init__(self) -> None:
        self._owed: Counter[tuple[int, bool]] = Counter()  # by rank, and whether for items

    def passed_on(self, message: Message) -> None:
        """Record that this was sent to the notebook."""
        if isinstance(message, Output):
            self._owed[message.rank, False] += len(message.data)
        elif isinstance(message, (Display, WidgetMessage)):
            self._owed[message.rank, True] += message.size

    def paid(self, credit: Credit) -> None:
        """Record that the notebook paid for some of it."""
        self._owed[credit.rank, credit.items] -= credit.size

    def settle(self) -> list[Credit]:
        """Return all that is owed, so that someone else can pay it: the notebook is gone."""
        owed, self._owed = self._owed, Counter()
        return [Credit(rank, size, items) for (rank, items), size in owed.items() if size > 0]
