"""Cells that wait until their ranks are free, and begin in the order in which they came."""

from __future__ import annotations

import contextlib
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
        begin: Begins a cell; raises SessionBusy if its ranks are not free after all. Returns what is to be called soon.
    """

    def __init__(self, traffic: Traffic, begin: Callable[[CellRecord], Later]) -> None:
        self._traffic = traffic
        self._begin = begin
        self._waiting: deque[CellRecord] = deque()
        self._lock = threading.Lock()
        self._busy = False  # a thread begins those that wait

    def put(self, record: CellRecord) -> Later | None:
        """Begin a cell now, or when its turn has come. Returns what is to be called soon.

        Raises:
            NbdistError: It can't run; it does not wait then.
        """
        with self._lock:
            if not self._busy and not self._traffic.running(record.ranks):
                with contextlib.suppress(SessionBusy):
                    return self._begin(record)
            self._waiting.append(record)
            if not self._busy:
                self._busy = True
                threading.Thread(target=self._run, name="nbdist-queue", daemon=True).start()
        return None

    def drop(self, wanted: Callable[[CellRecord], bool]) -> list[CellRecord]:
        """Give up cells that wait. Returns them."""
        with self._lock:
            dropped = [record for record in self._waiting if wanted(record)]
            for record in dropped:
                self._waiting.remove(record)
        for record in dropped:
            record.end("interrupted", "it was interrupted before its turn: nothing of it has run")
        return dropped

    def _run(self) -> None:
        while True:
            with self._lock:
                if not self._waiting:
                    self._busy = False
                    return
                record = self._waiting[0]
            self._traffic.wait_free(record.ranks, _LOOK)
            with self._lock:
                if not self._waiting or self._waiting[0] is not record:
                    continue
                if self._traffic.running(record.ranks):
                    continue
                try:
                    self._begin(record)()
                except SessionBusy:
                    continue
                except NbdistError as error:
                    record.end("lost" if isinstance(error, SessionError) else "failed", str(error))
                self._waiting.popleft()
