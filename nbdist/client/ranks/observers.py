"""Observers of what happens on the ranks of this notebook: what runs there, and samples of ranks and nodes.

Independent of the observers. They are called in the thread in which it happens; if one raises, its traceback is
printed, and the cell goes on.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING

from nbdist.client.output.page import OwnBars
from nbdist.metrics.node.sample import Sample
from nbdist.wire.questions.questions import Look

if TYPE_CHECKING:
    from nbdist.client.ranks.task_record import TaskRecord


class Observer:
    """Override any of these methods; each does nothing here.

    `key` names a set of ranks, which may be any of this notebook's: it is that of its traffic.
    """

    def cell_comes(self, key: str, ranks: Sequence[int]) -> None:
        """Handle that a cell or call is to run on these ranks, unless they are busy. They may be given work before."""

    def cell_interrupted(self, task: TaskRecord, ranks: Collection[int]) -> None:
        """Handle that these ranks of a task are about to be asked to stop. In any thread."""

    def cell_began(self, task: TaskRecord) -> None:
        """Handle a task that is about to be sent to its ranks, which are free for it."""

    def cell_ended(self, task: TaskRecord) -> None:
        """Handle the end of a task on every rank, or that nobody waits for it any more. In the task's own thread."""

    def bars_drawn(self, number: int, bars: OwnBars, lines: list[str]) -> None:
        """Handle that a cell is about to show lines with progress bars. In the thread that shows its output.

        Args:
            number: The cell's.
            bars: The ranks' own bars, by all such lines that are shown. It changes with them.
            lines: Those that are new.
        """

    def ranks_left(self, key: str) -> None:
        """Handle that these ranks live on, but no longer for this notebook. In any thread."""

    def node_looked_at(self, key: str, look: Look) -> None:
        """Handle a sample of a node from its agent. In the listening thread."""

    def ranks_looked_at(self, sample: Sample) -> None:
        """Handle a sample of ranks, or of the notebook's own process. In the sampling thread."""


_observers: list[Observer] = []


def subscribe(observer: Observer) -> Callable[[], None]:
    """Call an observer from now on.

    Returns:
        A function that unsubscribes it.
    """
    _observers.append(observer)

    def unsubscribe() -> None:
        if observer in _observers:
            _observers.remove(observer)

    return unsubscribe


def cell_comes(key: str, ranks: Sequence[int]) -> None:
    """Call all observers, like the functions below."""
    _call(lambda observer: observer.cell_comes(key, ranks))


def cell_interrupted(task: TaskRecord, ranks: Collection[int]) -> None:
    """See `Observer`."""
    _call(lambda observer: observer.cell_interrupted(task, ranks))


def cell_began(task: TaskRecord) -> None:
    """See `Observer`."""
    _call(lambda observer: observer.cell_began(task))


def cell_ended(task: TaskRecord) -> None:
    """See `Observer`."""
    _call(lambda observer: observer.cell_ended(task))


def bars_drawn(number: int, bars: OwnBars, lines: list[str]) -> None:
    """See `Observer`."""
    _call(lambda observer: observer.bars_drawn(number, bars, lines))


def ranks_left(key: str) -> None:
    """See `Observer`."""
    _call(lambda observer: observer.ranks_left(key))


def node_looked_at(key: str, look: Look) -> None:
    """See `Observer`."""
    _call(lambda observer: observer.node_looked_at(key, look))


def ranks_looked_at(sample: Sample) -> None:
    """See `Observer`."""
    _call(lambda observer: observer.ranks_looked_at(sample))


def _call(method: Callable[[Observer], None]) -> None:
    for observer in list(_observers):
        try:
            method(observer)
        except Exception:  # an observer's mistake: neither the cell nor other observers suffer from it
            traceback.print_exc()
