"""The ranks that wait for a line from the user: while one does, nobody's waiting for it ends by a timeout.

Handles messages, not sockets. Knows nothing of how the user is asked.
"""

from __future__ import annotations

from collections.abc import Sequence

from nbdist.controller.base.inquiries import AskRanks
from nbdist.wire.messages.output import Prompt
from nbdist.wire.questions.stopping import Enter, Rest

_NOBODY = "the notebook that ran this cell is gone, so input is not available"


class OpenPrompts:
    """The prompts that have not been answered. `ask`: asks control threads."""

    def __init__(self, ask: AskRanks) -> None:
        self._ask = ask
        self._open: dict[int, Prompt] = {}
        self._rested: set[int] = set()  # cells whose ranks no longer hurry

    def add(self, prompt: Prompt, serial: int, ranks: Sequence[int]) -> None:
        """Note that a rank waits for the user.

        Args:
            prompt: What it asks.
            serial: The cell it runs.
            ranks: All ranks of that cell.
        """
        self._open[prompt.rank] = prompt
        if serial not in self._rested:
            self._rested.add(serial)
            self._ask(ranks, Rest(serial))

    def answered(self, rank: int) -> None:
        """Note that the user has answered a rank, or that it no longer asks."""
        self._open.pop(rank, None)

    def forget(self, serial: int) -> None:
        """Note that a cell is over on all ranks."""
        self._rested.discard(serial)

    def refuse_all(self) -> None:
        """Have every rank that asks fail instead: nobody is left to answer."""
        prompts, self._open = self._open, {}
        for rank, prompt in prompts.items():
            self._ask([rank], Enter(prompt.sequence, _NOBODY, "refused"))
