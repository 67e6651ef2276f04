"""Ctrl-C: its message, and sections that it must not interrupt."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

HEED = 0.2  # maximum seconds of a wait, because a Ctrl-C just before it does not end it


def wait_for(event: threading.Event, timeout: float | None = None) -> bool:
    """Wait for an event in slices of `HEED`, so that no Ctrl-C is missed; otherwise like `event.wait(timeout)`."""
    deadline = None if timeout is None else time.monotonic() + timeout
    while not event.is_set():
        left = HEED if deadline is None else deadline - time.monotonic()
        if left <= 0:
            break
        event.wait(min(left, HEED))
    return event.is_set()


def interruption(text: str, *details: str) -> KeyboardInterrupt:
    """Return a KeyboardInterrupt that the notebook shows as one line and details, without our frames."""
    made = KeyboardInterrupt(text)
    lines = [f"KeyboardInterrupt: {text}", *details]
    made._render_traceback_ = lambda: lines  # type: ignore[attr-defined]
    return made


@contextlib.contextmanager
def events(put: Callable[[Any], None]) -> Iterator[None]:
    """Turn Ctrl-C in the body into an event, so that it never interrupts our own work.

    Args:
        put: Called with the class `KeyboardInterrupt` at each Ctrl-C, including those that `deferred` has kept.
    """
    deferral = _deferral if _in_main_thread() else None
    if deferral is None or deferral.put is not None:
        with _handled(lambda signum, frame: put(KeyboardInterrupt)):
            yield
        return
    deferral.hand_over(put)
    try:
        yield
    finally:
        deferral.put = None


@contextlib.contextmanager
def raised() -> Iterator[None]:
    """Have Ctrl-C in the body raise KeyboardInterrupt: it waits for the user, who may want to leave it."""
    with _handled(signal.default_int_handler):
        yield


@contextlib.contextmanager
def deferred() -> Iterator[None]:
    """Delay Ctrl-C to the end of the body, or pass it to `events` in the body; the rest of the body must be short.

    In the body of another one, the end of that one is meant.
    """
    if _deferral is not None and _deferral.put is None:
        yield
        return
    deferral = _Deferral()
    try:
        with _handled(deferral):
            yield
    except KeyboardInterrupt:
        raise  # which is all that another Ctrl-C could achieve
    except BaseException:  # a Ctrl-C that was delayed is not lost with the body
        deferral.strike()
        raise
    deferral.strike()


class _Deferral:
    """A Ctrl-C handler that counts, unless there is something to `put` each in."""

    put: Callable[[Any], None] | None = None

    def __init__(self) -> None:
        self._count = 0

    def __call__(self, signum: int, frame: object) -> None:
        if self.put is not None:
            self.put(KeyboardInterrupt)
        else:
            self._count += 1

    def hand_over(self, put: Callable[[Any], None]) -> None:
        """Put them there from now on, those that were counted too."""
        self.put = put
        while self._count:
            self._count -= 1
            put(KeyboardInterrupt)

    def strike(self) -> None:
        if self._count:
            raise interruption("interrupted")


_deferral: _Deferral | None = None  # what gets Ctrl-C now, if it is one


def _in_main_thread() -> bool:
    """Return whether this is the thread that gets Ctrl-C."""
    return threading.current_thread() is threading.main_thread()


@contextlib.contextmanager
def _handled(handler: Callable[[int, Any], Any]) -> Iterator[None]:
    """Have Ctrl-C call `handler` in the body."""
    global _deferral
    if not _in_main_thread():
        yield
        return
    outer = _deferral
    before = signal.signal(signal.SIGINT, handler)
    _deferral = handler if isinstance(handler, _Deferral) else None
    try:
        yield
    finally:
        _deferral = outer
        signal.signal(signal.SIGINT, before)
