"""When the allocation of a session ends, as far as that is known, and what happens once it is announced."""

from __future__ import annotations

import math
import threading
import time
import weakref

from nbdist.client.ranks.rank_set import RankSet
from nbdist.client.reports.announced_end import describe_end, when
from nbdist.client.session.save_at_end import Savable, describe_save, save_at_end
from nbdist.client.start.expected_end import ExpectedEnd
from nbdist.wire.messages.announcements import SAVE_LEAD, EndAnnounced, EndSource
from nbdist.wire.messages.output import Notice

_TOGETHER = 30.0  # seconds within which the same signal to several processes is one announcement
_PERIOD = 60.0  # seconds between two looks at the clock, which others may set
_LOOK_AGAIN = 5.0  # ... while a save waits for it
_ASK_AGAIN = 300.0  # seconds until the user's command is asked again how long it is


class AllocationEnd:
    """What is known of it.

    Args:
        session: Whose allocation it is; referred to weakly.
        rank_set: Its ranks.
    """

    def __init__(self, session: Savable, rank_set: weakref.ref[RankSet]) -> None:
        self._session = weakref.ref(session)
        self._rank_set = rank_set
        self._lock = threading.Lock()
        self._announced: dict[EndSource, tuple[float, EndAnnounced]] = {}  # with when, by time.time
        self._expected: ExpectedEnd | None = None
        self._lead = 0.0  # seconds before it when it is to be announced
        self._asked = 0.0
        self._over = threading.Event()  # ends the thread that watches the clock

    @property
    def seconds_left(self) -> float | None:
        """Seconds until the end, 0 after it; None: it is not known."""
        with self._lock:
            return self._left()

    def _left(self) -> float | None:
        ends = [at + known.seconds for at, known in self._announced.values() if known.seconds is not None]
        if self._expected is not None and self._expected.at < math.inf:
            ends.append(self._expected.at)
        return max(0.0, min(ends) - time.time()) if ends else None

    def begin(self) -> None:
        """Begin with new ranks: nothing has been announced."""
        with self._lock:
            self._announced.clear()

    def expect(self, expected: ExpectedEnd | None, warn: float) -> None:
        """Announce an end that is known.

        Args:
            expected: The end; None: none is known.
            warn: Seconds before it; half of the time if less is left. 0: don't.
        """
        with self._lock:
            self._over.set()
            self._over = over = threading.Event()
            self._expected, self._asked = expected, time.monotonic()
            self._lead = 0.0
            if expected is not None:
                self._lead = min(warn, max(0.0, expected.at - time.time()) / 2)
        if expected is not None and self._lead:
            arguments = (weakref.ref(self), over)
            threading.Thread(target=_watch, args=arguments, name="nbdist-clock", daemon=True).start()

    def look(self) -> float | None:
        """Announce the end if it is time. Returns the seconds until the next look; None: none is needed."""
        with self._lock:
            expected, asked = self._expected, self._asked
        if expected is None or self._session() is None:
            return None
        now = time.time()
        if expected.command and (time.monotonic() - asked >= _ASK_AGAIN or now >= expected.at - self._lead):
            expected = expected.asked_again()
        with self._lock:
            if expected is not self._expected:
                self._expected, self._asked = expected, time.monotonic()
            due = expected.at - self._lead
            said = "clock" in self._announced
            if said and now < due - _PERIOD:  # it has been put off
                del self._announced["clock"]
        if now < due:
            return min(_PERIOD, due - now)
        if not said:
            self.hear(EndAnnounced("clock", seconds=max(0.0, expected.at - now)))
        return _PERIOD if expected.command else None

    def withdraw(self, source: EndSource) -> None:
        """Forget an announcement that does not hold any more."""
        with self._lock:
            self._announced.pop(source, None)

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
        saves = self._announce(announcement)
        if not saves or announcement.source == "idle":  # idle ranks are saved when they end
            return
        if announcement.source != "clock" or self._await_lead():
            self.save(stop=True)

    def _announce(self, announcement: EndAnnounced) -> bool:
        """Say an announcement. Returns whether the session is to be saved."""
        session, rank_set = self._session(), self._rank_set()
        if session is None or rank_set is None or rank_set.closed:
            return False
        then = describe_save(session.saves_to, announcement) if session.saves_to else ""
        rank_set.traffic.notify(Notice(describe_end(announcement, then)))
        return bool(session.saves_to)

    def _await_lead(self) -> bool:
        """Wait until little time is left. Returns whether that has come; False: the end was put off, or ranks ended."""
        rest = threading.Event()
        first = self.seconds_left
        while self._is_open() and (left := self.seconds_left) is not None:
            if left <= SAVE_LEAD:
                return True
            if first is not None and left > first:
                return False
            rest.wait(min(_LOOK_AGAIN, left - SAVE_LEAD))
        return False

    def _is_open(self) -> bool:
        rank_set = self._rank_set()
        return self._session() is not None and rank_set is not None and not rank_set.closed

    def save(self, *, stop: bool) -> bool:
        """Save the session, if it has a folder for that and ranks, and say what was saved.

        Args:
            stop: Whether to stop first what ranks run.

        Returns:
            Whether nothing would be lost now that was to be saved.
        """
        session, rank_set = self._session(), self._rank_set()
        if session is None or not session.saves_to or rank_set is None or rank_set.closed:
            return True
        traffic = rank_set.traffic
        return save_at_end(session, lambda text: traffic.notify(Notice(text)), stop=stop)

    @property
    def words(self) -> str:
        """When the end is, for the panel and `status`; "" if nothing is known."""
        with self._lock:
            left = self._left()
            signals = [(at, known) for at, known in self._announced.values() if known.source != "clock"]
            source = self._expected.source if self._expected is not None else ""
        if not signals and left == 0:
            return f"the allocation was to end before now ({source})"
        if not signals:
            return "" if left is None else f"the allocation ends {when(left)} ({source})"
        at, last = max(signals, key=lambda each: each[0])
        if last.source == "idle":
            return f"the idle ranks end {when(left or 0.0)} (--idle)"
        came = f"{last.source} at {time.strftime('%H:%M', time.localtime(at))}"
        if left is None:
            return f"the allocation ends soon ({came})"
        return f"{'the allocation' if last.seconds is None else 'the session'} ends {when(left)} ({came})"


def _watch(known: weakref.ref[AllocationEnd], over: threading.Event) -> None:
    wait: float | None = 0.0
    while wait is not None and not over.wait(wait):
        end = known()
        wait = None if end is None else end.look()
        del end
