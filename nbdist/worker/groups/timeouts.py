"""How long collectives may wait: without a limit while the user types on some rank, else as long as was given.

Torch fixes the limit of a collective when it starts: one that has started keeps its own.
"""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import Any

from nbdist.worker.groups import torch_groups

_NEVER = timedelta(days=365)


class Timeouts:
    """The timeouts of all groups that this rank is in."""

    def __init__(self) -> None:
        self._before: list[tuple[Any, timedelta]] = []
        self._lock = threading.Lock()

    def suspend(self) -> None:
        """Let collectives that start from now on wait for as long as it takes. From any thread; again: no effect."""
        with self._lock:
            if self._before:
                return
            for group in torch_groups.living().values():
                for backend in torch_groups.backends(group).values():
                    before = torch_groups.timeout_of(backend)
                    if before is not None and all(backend is not known for known, _ in self._before):
                        self._before.append((backend, before))
                        torch_groups.set_timeout(backend, _NEVER)

    def resume(self) -> None:
        """Give them their own limits again."""
        with self._lock:
            before, self._before = self._before, []
        for backend, timeout in before:
            torch_groups.set_timeout(backend, timeout)
