"""The cells that have ended last, for those who follow the session without driving it. Pure."""

from __future__ import annotations

from collections import deque

from nbdist.wire.messages.visitor_messages import FollowedCell

_KEPT = 100


class EndedCells:
    """Cells in the order of their ends, counted from the session's start."""

    def __init__(self) -> None:
        self._cells: deque[FollowedCell] = deque(maxlen=_KEPT)
        self.count = 0

    def add(self, cell: FollowedCell) -> None:
        """Note that a cell has ended."""
        self._cells.append(cell)
        self.count += 1

    def since(self, seen: int) -> tuple[list[FollowedCell], int]:
        """Return the cells that have ended after the first `seen`, and how many of them are not kept any more."""
        first = self.count - len(self._cells)
        return list(self._cells)[max(0, seen - first) :], max(0, first - seen)
