"""How long collectives may wait: without a limit while the user types on some rank, else as long as was given.

Torch fixes the limit of a collective when it starts: one that has started keeps its own.
"""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import Any

from nbdist.train.collective import participants
from nbdist.worker.groups import torch_groups

_NEVER = timedelta(days=365)


class Timeouts:
    """The timeouts of all groups that this rank is in."""

    def __init__(self) -> None:
        self._before: list[tuple[Any, timedelta]] = []
        self._lock = threading.Lock()
        self._running = 0
        self._unlimited = 0  # the cell in which another rank waits for the user

    def begin(self, serial: int) -> None:
        """Note that a cell begins, in which another rank may wait for the user already."""
        self.resume()
        with self._lock:
            self._running = serial
            if self._unlimited == serial:
                self._suspend()

    def suspend(self, serial: int) -> None:
        """Let collectives that start from now on wait for as long as it takes, until a cell ends.

        From any thread; again: no effect.

        Args:
            serial: The cell; one that has not begun here waits so from its beginning.
        """
        with self._lock:
            self._unlimited = serial
            if self._running == serial:
                self._suspend()

    def resume(self) -> None:
        """Give them their own limits again: no cell runs."""
        with self._lock:
            self._running = 0
            before, self._before = self._before, []
        for backend, timeout in before:
            torch_groups.set_timeout(backend, timeout)

    def _suspend(self) -> None:
        participants.wait_without_limit()
        if self._before:
            return
        for group in torch_groups.living().values():
            for backend in torch_groups.backends(group).values():
                before = torch_groups.timeout_of(backend)
                if before is not None and all(backend is not known for known, _ in self._before):
                    self._before.append((backend, before))
                    torch_groups.set_timeout(backend, _NEVER)
