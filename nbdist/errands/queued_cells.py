"""Cells that wait until their ranks are free, and begin in the order in which they came."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

from nbdist.client.ranks.traffic import Traffic
from nbdist.errands.cell_records import CellRecord
from nbdist.errors import NbdistError, SessionBusy, SessionError

Later = Callable[[], object]

_LOOK = 0.5  # seconds between two looks whether a cell that waits is still wanted


class QueuedCells:
    """The cells of one session that wait.

    Args:
        traffic: The session's.
        begin: Begins a cell; raises SessionBusy if its ranks are not free after all.
    """

    def __init__(self, traffic: Traffic, begin: Callable[[CellRecord], object]) -> None:
        self._traffic = traffic
        self._begin = begin
        self._waiting: deque[CellRecord] = deque()
        self._lock = threading.Lock()
        self._busy = False  # somebody begins those that wait

    def put(self, record: CellRecord) -> Later | None:
        """Have a cell begin when its turn has come.

        Returns:
            If that is now: what begins it, to be called soon. It then counts as running already.
        """
        with self._lock:
            self._waiting.append(record)
            if self._busy:
                return None
            self._busy = True
        if self._traffic.running(record.ranks):
            threading.Thread(target=self._begin_all, name="nbdist-queue", daemon=True).start()
            return None
        record.state = "running"
        return self._begin_first

    def drop(self, wanted: Callable[[CellRecord], bool]) -> list[CellRecord]:
        """Give up cells that wait. Returns them."""
        with self._lock:
            dropped = [record for record in self._waiting if wanted(record)]
            for record in dropped:
                self._waiting.remove(record)
        for record in dropped:
            record.end("interrupted", "it was interrupted before its turn: nothing of it has run")
        return dropped

    def _begin_first(self) -> None:
        """Begin the first, in the thread that calls, and leave those behind it to a thread of their own."""
        with self._lock:
            self._begin_next()
            if not self._waiting:
                self._busy = False
                return
        threading.Thread(target=self._begin_all, name="nbdist-queue", daemon=True).start()

    def _begin_all(self) -> None:
        while True:
            with self._lock:
                if not self._waiting:
                    self._busy = False
                    return
                ranks = self._waiting[0].ranks
            self._traffic.wait_free(ranks, _LOOK)
            with self._lock:
                self._begin_next()

    def _begin_next(self) -> None:
        """Begin the first that waits, if its ranks are free. With the lock, so that it can't be dropped meanwhile."""
        if not self._waiting or self._traffic.running(self._waiting[0].ranks):
            return
        record = self._waiting[0]
        try:
            self._begin(record)
        except SessionBusy:
            record.state = "queued"
            return
        except NbdistError as error:
            record.end("lost" if isinstance(error, SessionError) else "failed", str(error))
        self._waiting.popleft()
