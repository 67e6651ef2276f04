"""How far the training loop of a running cell has come, by the samples that something else has taken.

Asks no rank: a page that shows the panel has ranks sampled, and so does a recorded history.
"""

from __future__ import annotations

from collections.abc import Collection

from nbdist.client.ranks.observers import Observer
from nbdist.metrics.node.sample import Sample


class CellStepsSeen(Observer):
    """Remembers the steps of each rank in its cell, as last sampled."""

    def __init__(self) -> None:
        self._cell = 0
        self._steps: dict[int, int] = {}

    def ranks_looked_at(self, sample: Sample) -> None:
        """Note them."""
        known = {rank.rank: rank.step.in_cell for rank in sample.ranks if rank.step is not None}
        self._cell, self._steps = sample.cell, known

    def of(self, cell: int, ranks: Collection[int]) -> int:
        """Return the step up to which all of these ranks have come in their cell; 0 if that is not known."""
        if cell != self._cell:
            return 0
        return min((self._steps.get(rank, 0) for rank in ranks), default=0)
