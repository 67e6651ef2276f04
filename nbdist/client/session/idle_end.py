"""Ends ranks on which no cell has run for long, and so frees their GPUs: `%distributed start --idle 30m`."""

from __future__ import annotations

import threading
import time
import weakref

from nbdist.base.text import span
from nbdist.client.ranks.rank_set import RankSet
from nbdist.client.session.allocation_end import AllocationEnd
from nbdist.wire.messages.announcements import EndAnnounced
from nbdist.wire.messages.output import Notice

_WARNING = 300.0  # seconds before the end; half of the time if that is less
_PERIOD = 30.0  # seconds between two looks whether a long cell still runs


def watch_idle(rank_set: RankSet, end: AllocationEnd, limit: float) -> None:
    """Watch a set of ranks, in a thread, until it ends or is replaced.

    Args:
        rank_set: The ranks.
        end: Announces their end.
        limit: Seconds without a cell after which they end.
    """
    watch = _IdleWatch(rank_set, end, limit)
    threading.Thread(target=watch.run, name="nbdist-idle", daemon=True).start()


class _IdleWatch:
    def __init__(self, rank_set: RankSet, end: AllocationEnd, limit: float) -> None:
        self._rank_set, self._end = weakref.ref(rank_set), weakref.ref(end)
        self._sets = rank_set.sets_started
        self._limit, self._warning = limit, min(_WARNING, limit / 2)
        self._said = False

    def run(self) -> None:
        rest = threading.Event()
        while (wait := self._look()) is not None:
            rest.wait(wait)

    def _look(self) -> float | None:
        """Do what is due. Returns the seconds until the next look; None: there is nothing to watch any more."""
        rank_set, end = self._rank_set(), self._end()
        if rank_set is None or end is None or rank_set.closed or rank_set.sets_started != self._sets:
            return None
        now = time.monotonic()
        if rank_set.traffic.running(info.rank for info in rank_set.ranks):
            rank_set.last_used = now
        left = rank_set.last_used + self._limit - now
        if left <= 0:
            if not end.save(stop=False):  # they stay, as all would be lost
                end.withdraw("idle")
                self._said, rank_set.last_used = False, time.monotonic()
                return 0.0
            if rank_set.traffic.running(info.rank for info in rank_set.ranks):
                return 0.0  # a cell has come meanwhile
            self._end_ranks(rank_set)
            return None
        if left > self._warning:
            if self._said:
                end.withdraw("idle")
            self._said = False
            return min(_PERIOD, left - self._warning)
        if not self._said:
            self._said = True
            end.hear(EndAnnounced("idle", seconds=left))
        return min(_PERIOD, left)

    def _end_ranks(self, rank_set: RankSet) -> None:
        text = (
            f"the ranks have ended, as no cell had run on them for {span(self._limit)} (`start --idle`). The notebook "
            "and its variables are kept; `%distributed start` starts new ranks"
        )
        rank_set.close()
        rank_set.left = text
        rank_set.traffic.notify(Notice(text))
