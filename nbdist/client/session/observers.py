"""Who wants to know what happens on the ranks of this notebook: what runs there, and what looks at them find.

Knows nothing of those who ask. They are called in the thread in which it happens; one that raises has its traceback
printed, and the cell goes on.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import TYPE_CHECKING

from nbdist.metrics.node.sample import Sample
from nbdist.wire.questions import Look

if TYPE_CHECKING:
    from nbdist.client.session.task import Task
    from nbdist.client.session.traffic import Traffic


class Observer:
    """What to override: each method does nothing here. The set of ranks may be any that this notebook has."""

    def cell_began(self, task: Task) -> None:
        """A task is about to be sent to its ranks, which are free for it."""

    def cell_ended(self, task: Task) -> None:
        """Every rank has ended its part of a task, or nobody waits for it any more. In the task's own thread."""

    def node_looked_at(self, traffic: Traffic, look: Look) -> None:
        """The agent of a node has looked at it. In the listening thread."""

    def ranks_looked_at(self, sample: Sample) -> None:
        """Ranks, or the notebook's own process, have been looked at. In the thread of whoever looks."""


_observers: list[Observer] = []


def subscribe(observer: Observer) -> Callable[[], None]:
    """Have an observer called from now on.

    Returns:
        What ends it.
    """
    _observers.append(observer)

    def unsubscribe() -> None:
        if observer in _observers:
            _observers.remove(observer)

    return unsubscribe


def cell_began(task: Task) -> None:
    """Call all observers, as the others below do."""
    _call(lambda observer: observer.cell_began(task))


def cell_ended(task: Task) -> None:
    """See `Observer`."""
    _call(lambda observer: observer.cell_ended(task))


def node_looked_at(traffic: Traffic, look: Look) -> None:
    """See `Observer`."""
    _call(lambda observer: observer.node_looked_at(traffic, look))


def ranks_looked_at(sample: Sample) -> None:
    """See `Observer`."""
    _call(lambda observer: observer.ranks_looked_at(sample))


def _call(method: Callable[[Observer], None]) -> None:
    for observer in list(_observers):
        try:
            method(observer)
        except Exception:
            traceback.print_exc()
