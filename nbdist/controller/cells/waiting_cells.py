"""The cells that have not begun, each with what it waits for."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from nbdist.wire.messages.cells import Execute

_EXPLAIN_EVERY = 1.0  # seconds that a cell waits for ranks before this is shown, and between updates of the line

# What a cell waits for, in this order: that a change of who the ranks are is over; that what it takes along has come
# to other nodes; and that its ranks are repaired after cells that failed.
Reason = Literal["change", "values", "repairs"]


@dataclass
class WaitingCell:
    """A cell that has not begun.

    Attributes:
        reason: What it waits for.
        since: Since when it waits for repairs; None if it does not.
        due: When to report, again, that it does.
        settled: Whether everything that can be renewed for it has been.
        said: Whether the wait has been reported.
    """

    message: Execute
    reason: Reason = "change"
    since: float | None = None
    due: float = 0.0
    settled: bool = False
    said: bool = False

    @property
    def serial(self) -> int:
        """The number by which messages name the cell."""
        return self.message.serial

    def wait_for_repairs(self, now: float) -> None:
        """Note that its ranks are not in order."""
        if self.since is None:
            self.since = now
            self.put_off(now)

    def put_off(self, now: float) -> None:
        """Report the wait, again, after a while."""
        self.due = now + _EXPLAIN_EVERY


class WaitingCells:
    """All cells of a set of ranks that have not begun, in the order in which they came."""

    def __init__(self) -> None:
        self._cells: dict[int, WaitingCell] = {}

    def add(self, message: Execute) -> WaitingCell:
        """Add a cell."""
        cell = self._cells[message.serial] = WaitingCell(message)
        return cell

    def get(self, serial: int) -> WaitingCell | None:
        """Return a cell; None if it has begun, or was dropped."""
        return self._cells.get(serial)

    def remove(self, cell: WaitingCell) -> None:
        """Remove a cell that begins, or is dropped."""
        self._cells.pop(cell.serial, None)

    def for_reason(self, reason: Reason) -> Iterator[WaitingCell]:
        """Yield those that wait for this, without those that are removed meanwhile."""
        for cell in list(self._cells.values()):
            if cell.reason == reason and self._cells.get(cell.serial) is cell:
                yield cell

    def repaired_for(self) -> list[WaitingCell]:
        """Return those that have been found to wait for repairs."""
        return [cell for cell in self._cells.values() if cell.since is not None]

    @property
    def under_way(self) -> bool:
        """Whether there are any that no change of the ranks holds up."""
        return any(cell.reason != "change" for cell in self._cells.values())
