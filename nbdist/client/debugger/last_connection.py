"""Waits until debugpy's adapter is done with a connection: one that comes before is the last that it accepts.

Its thread that accepts connections tells the oldest session of each new one, and ends with an error if that session is
just closing (debugpy 1.8.22, `adapter/sessions.py`, `report_sockets`). The kernel's debugger then never answers again.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import time
from pathlib import Path

_THREADS = 2  # that serve a connection: one reads, one handles
_LIMIT = 2.0  # seconds
_PERIOD = 0.005


class LastConnection:
    """The connection that the page has ended, as far as it is seen in the adapter's process."""

    def __init__(self) -> None:
        self._adapter: Path | None = None
        self._threads: set[str] = set()  # of the adapter since the connection, while there still was the connection
        self._before: set[str] = set()  # of the adapter before it: each connection leaves one that sleeps for a minute

    def ends(self, port: str) -> None:
        """Note that the connection is about to end. `port`: where the adapter listens."""
        if self._adapter is None or not self._adapter.exists():
            self._adapter = _adapter_at(port)
        self._threads = self._threads_now() - self._before

    async def wait_for_end(self) -> None:
        """Wait until the threads that serve it are gone."""
        deadline = time.monotonic() + _LIMIT
        while self._threads and time.monotonic() < deadline:
            if len(self._threads - self._threads_now()) >= _THREADS:
                break
            await asyncio.sleep(_PERIOD)
        self._threads, self._before = set(), self._threads_now()

    def _threads_now(self) -> set[str]:
        try:
            return set(os.listdir(self._adapter / "task")) if self._adapter is not None else set()
        except OSError:
            return set()


def _adapter_at(port: str) -> Path | None:
    """Return the folder of the adapter's process, which is nobody's child; None if there is none."""
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            words = (folder / "cmdline").read_bytes().split(b"\0")
            if (b"--port", port.encode()) in itertools.pairwise(words) and b"--for-server" in words:
                return folder
    return None
