"""Saves a session again and again, for when its ranks or its machine are lost: `%distributed start --every 30m`."""

from __future__ import annotations

import threading
import time
import weakref
from pathlib import Path

from nbdist.base.text import span
from nbdist.client.ranks.rank_set import RankSet
from nbdist.client.session.save_at_end import Savable
from nbdist.errors import NbdistError, SessionBusy
from nbdist.wire.messages.output import Notice

_RETRY = 10.0  # seconds until ranks that run what can't be saved are asked again; the period if that is less


class RegularSaves:
    """The saves of one set of ranks, by a thread that ends with it.

    Args:
        session: What is saved, to its `saves_to`; referred to weakly, like its ranks.
        rank_set: The ranks.
        period: Seconds between two saves. Ranks on which nothing has run since the last one are not saved again.
    """

    def __init__(self, session: Savable, rank_set: RankSet, period: float) -> None:
        self._session, self._rank_set = weakref.ref(session), weakref.ref(rank_set)
        self._sets = rank_set.sets_started
        self._period = period
        self._saved_use: float | None = rank_set.last_used  # what had run by the last save; None: it still ran
        self._last: tuple[float, Path] | None = None  # when, by time.time, and where
        self._failure = ""

    def start(self) -> None:
        """Begin."""
        threading.Thread(target=self._run, name="nbdist-saves", daemon=True).start()

    @property
    def words(self) -> str:
        """When the last save was, for `status`."""
        every = f"`--every {span(self._period)}`"
        if self._failure:
            return f"the session could not be saved ({every}): {self._failure}"
        if self._last is None:
            return f"the session has not been saved yet ({every})"
        at, path = self._last
        return f"saved {span(time.time() - at)} ago to {path} ({every})"

    def _run(self) -> None:
        rest = threading.Event()
        wait: float | None = self._period
        while wait is not None:
            rest.wait(wait)
            wait = self._save()

    def _save(self) -> float | None:
        """Save if there is something new. Returns the seconds until the next time; None: the ranks are gone."""
        session, rank_set = self._session(), self._rank_set()
        if session is None or rank_set is None or rank_set.closed or rank_set.sets_started != self._sets:
            return None
        everyone = [info.rank for info in rank_set.ranks]
        used, running = rank_set.last_used, bool(rank_set.traffic.running(everyone))
        if used == self._saved_use and not running:
            return self._period
        try:
            report = session.save(session.saves_to, stop=False)
        except SessionBusy:
            return min(_RETRY, self._period)
        except NbdistError as error:
            if not self._failure and not rank_set.closed:
                rank_set.traffic.notify(Notice(f"the session was not saved (`start --every`): {error}"))
            self._failure = str(error)
            return self._period
        if self._last is None:
            rank_set.traffic.notify(Notice(f"{report}\nFurther saves are in `%distributed status` only."))
        self._last, self._failure = (time.time(), report.path), ""
        running = running or bool(rank_set.traffic.running(everyone))
        if not running:
            rank_set.last_used = used  # a save is no use of the ranks, which may be idle
        self._saved_use = None if running else used
        return self._period
