"""When the allocation of a session ends, as far as that is known, and what happens once it is announced."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable

from nbdist.client.reports.announced_end import describe_end, when
from nbdist.client.requests.rank_requests import RankRequests
from nbdist.wire.messages.announcements import EndAnnounced, EndSource

_TOGETHER = 30.0  # seconds within which the same signal to several processes is one announcement


def on_end_announced(session: RankRequests, announcement: EndAnnounced, say: Callable[[str], None]) -> None:
    """Act on an announced end, once for each: in a thread of its own, which may wait.

    Args:
        session: The session, whose ranks may be running a cell.
        announcement: What announced the end, and how many seconds are left.
        say: Shows the user a line.
    """
    say(describe_end(announcement))


class AllocationEnd:
    """What is known of it.

    Args:
        session: Whose allocation it is; referred to weakly.
        say: Shows the user a line.
    """

    def __init__(self, session: RankRequests, say: Callable[[str], None]) -> None:
        self._session = weakref.ref(session)
        self._say = say
        self._announced: dict[EndSource, tuple[float, EndAnnounced]] = {}  # with when, by time.time
        self._lock = threading.Lock()

    def begin(self) -> None:
        """Forget what was announced: the ranks are new ones."""
        with self._lock:
            self._announced.clear()

    def hear(self, announcement: EndAnnounced) -> None:
        """Note an announcement, and act on it. From any thread, and from handlers of signals: it does not wait."""
        threading.Thread(target=self._act, args=(announcement,), name="nbdist-end", daemon=True).start()

    def _act(self, announcement: EndAnnounced) -> None:
        with self._lock:
            now = time.time()
            known = self._announced.get(announcement.source)
            if known is not None and now - known[0] < _TOGETHER:
                return
            self._announced[announcement.source] = now, announcement
        if (session := self._session()) is not None:
            on_end_announced(session, announcement, self._say)

    @property
    def words(self) -> str:
        """When the end is, for the panel and `status`; "" if nothing is known."""
        with self._lock:
            last = max(self._announced.values(), key=lambda each: each[0], default=None)
        if last is None:
            return ""
        at, announcement = last
        if announcement.seconds is None:
            return f"the allocation ends soon ({announcement.source} at {time.strftime('%H:%M', time.localtime(at))})"
        return f"the session ends {when(at + announcement.seconds - time.time())} ({announcement.source})"
