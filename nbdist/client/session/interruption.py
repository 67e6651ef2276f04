"""Ctrl-C: in words, and where it must not strike in the middle."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

HEED = 0.2  # seconds that a wait may last, as a Ctrl-C that comes just before it does not end it


def interruption(text: str, *details: str) -> KeyboardInterrupt:
    """KeyboardInterrupt that the notebook shows as one line, and lines of details, instead of frames of ours."""
    made = KeyboardInterrupt(text)
    lines = [f"KeyboardInterrupt: {text}", *details]
    made._render_traceback_ = lambda: lines  # type: ignore[attr-defined]
    return made


@contextlib.contextmanager
def events(put: Callable[[Any], None]) -> Iterator[None]:
    """Ctrl-C in the body becomes an event, so that it never strikes in the middle of our own work.

    Args:
        put: Called with `KeyboardInterrupt`, the class, at each Ctrl-C; also for those that `deferred` has kept so far.
    """
    with _handled(lambda signum, frame: put(KeyboardInterrupt)) as before:
        if isinstance(before, _Deferral):
            before.hand_over(put)
        yield


@contextlib.contextmanager
def deferred() -> Iterator[None]:
    """Ctrl-C in the body comes at its end, or goes to `events` in the body; the rest of the body has to be short."""
    deferral = _Deferral()
    try:
        with _handled(deferral):
            yield
    except KeyboardInterrupt:
        raise  # which is all that another Ctrl-C could ask for
    except BaseException:
        deferral.strike()
        raise
    deferral.strike()


class _Deferral:
    """A handler of Ctrl-C that counts."""

    def __init__(self) -> None:
        self._count = 0

    def __call__(self, signum: int, frame: object) -> None:
        self._count += 1

    def hand_over(self, put: Callable[[Any], None]) -> None:
        while self._count:
            self._count -= 1
            put(KeyboardInterrupt)

    def strike(self) -> None:
        if self._count:
            raise interruption("interrupted")


@contextlib.contextmanager
def _handled(handler: Callable[[int, Any], Any]) -> Iterator[Any]:
    """Ctrl-C calls this in the body, which is given the handler before it."""
    if threading.current_thread() is not threading.main_thread():  # others get none
        yield None
        return
    before = signal.signal(signal.SIGINT, handler)
    try:
        yield before
    finally:
        signal.signal(signal.SIGINT, before)
