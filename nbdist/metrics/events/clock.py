"""How long steps take, without ever making the device wait.

Owns the two clocks: the processor's, and for GPUs events in the stream, which are read once they have passed. A loop
that prints its loss every tenth step looks to the processor like nine short steps and a long one; to the device it does
not. Independent of what a step is.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Any, Generic, Protocol, TypeVar

_SETTLE = 1.0  # seconds that the last steps of a loop may take to end, once it has ended for the processor

T = TypeVar("T")


class Clock(Protocol[T]):
    """What both clocks do."""

    def tick(self, step: T, now: float) -> None:
        """Note the end of a step, at this time by `time.monotonic`."""

    def ended(self) -> list[tuple[T, float]]:
        """Return steps whose seconds are known by now, each once."""

    def mark(self) -> Callable[[], bool]:
        """Return what says whether all that was queued by now is done: then the device has nothing to do."""

    def restart(self) -> list[tuple[T, float]]:
        """Count the time until the next tick as part of no step.

        Returns:
            Steps whose seconds are known by now.
        """


class HostClock(Generic[T]):
    """For work that is done when a step returns."""

    def __init__(self) -> None:
        self._last: float | None = None
        self._ended: list[tuple[T, float]] = []

    def tick(self, step: T, now: float) -> None:
        """Note the end of a step; see `Clock`."""
        if self._last is not None:
            self._ended.append((step, now - self._last))
        self._last = now

    def ended(self) -> list[tuple[T, float]]:
        """Return the steps since the last call; see `Clock`."""
        found, self._ended = self._ended, []
        return found

    def mark(self) -> Callable[[], bool]:
        """Return what says that nothing is queued; see `Clock`."""
        return lambda: True

    def restart(self) -> list[tuple[T, float]]:
        """Start timing again; see `Clock`."""
        self._last = None
        return self.ended()


class DeviceClock(Generic[T]):
    """For work that is queued. Used by the thread that queues it, and never while its stream is captured.

    Args:
        record: Gives what `torch.cuda.Event(enable_timing=True)` gives, recorded in the stream that works.
    """

    def __init__(self, record: Callable[[], Any]) -> None:
        self._record = record
        self._last: Any = None
        self._queued: deque[tuple[T, Any, Any]] = deque()

    def tick(self, step: T, now: float) -> None:
        """Note the end of a step; see `Clock`."""
        event = self._record()
        if self._last is not None:
            self._queued.append((step, self._last, event))
        self._last = event

    def mark(self) -> Callable[[], bool]:
        """Return what says whether this point has been reached; see `Clock`."""
        is_reached: Callable[[], bool] = self._record().query
        return is_reached

    def restart(self) -> list[tuple[T, float]]:
        """Start timing again; see `Clock`. Waits a moment for steps that still run, and forgets those that go on."""
        self._last = None
        found = self.ended()
        deadline = time.monotonic() + _SETTLE
        while self._queued and time.monotonic() < deadline:
            time.sleep(0.001)
            found += self.ended()
        self._queued.clear()
        return found

    def ended(self) -> list[tuple[T, float]]:
        """Return the steps that the device has passed; see `Clock`."""
        found = []
        while self._queued and self._queued[0][2].query():
            step, first, last = self._queued.popleft()
            found.append((step, first.elapsed_time(last) / 1000))
        return found
