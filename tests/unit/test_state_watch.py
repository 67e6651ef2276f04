"""Pages are told how the session is whenever it has changed, and again if an answer brought them an older state."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator

import pytest

from nbdist.lab.state_watch import StateWatch
from nbdist.wire.pages.page_messages import CellOnRanks, SessionState
from testbed.kernel import wait_until

IDLE = SessionState(2, ["cpu"], [], "", [], False, 0, "58edd547")
RUNNING = SessionState(2, ["cpu"], [], "", [CellOnRanks(7, 2, 0, 1.5)], False, 0, "58edd547")
LIMIT = 10.0


class Pages:
    """Two pages, and the session that they look at."""

    def __init__(self) -> None:
        self.state = IDLE
        self._looks = threading.Semaphore(0)
        self.watch = StateWatch(self._look)
        self.first: queue.Queue[SessionState] = queue.Queue()
        self.second: queue.Queue[SessionState] = queue.Queue()
        self._stop = [self.watch.subscribe("first", self.first.put), self.watch.subscribe("second", self.second.put)]

    def _look(self) -> SessionState:
        self._looks.release()
        return self.state

    def await_looks(self, count: int) -> None:
        """Wait until there were so many looks from now on."""
        while self._looks.acquire(blocking=False):
            pass
        for _ in range(count):
            assert self._looks.acquire(timeout=LIMIT)

    def close(self) -> None:
        for stop in self._stop:
            stop()


@pytest.fixture
def pages() -> Iterator[Pages]:
    pages = Pages()
    for page in (pages.first, pages.second):
        assert page.get(timeout=LIMIT) == IDLE
    yield pages
    pages.close()
    wait_until(lambda: "nbdist-pages" not in [thread.name for thread in threading.enumerate()], "the thread to end")


def test_a_change_is_told_once(pages: Pages) -> None:
    pages.state = RUNNING
    assert pages.first.get(timeout=LIMIT) == pages.second.get(timeout=LIMIT) == RUNNING
    pages.await_looks(2)
    assert pages.first.empty() and pages.second.empty()


def test_a_page_whose_answer_was_of_a_moment_ago_is_told_again_and_no_other(pages: Pages) -> None:
    pages.watch.told("first", RUNNING)
    assert pages.first.get(timeout=LIMIT) == IDLE
    pages.await_looks(2)
    assert pages.first.empty() and pages.second.empty()
