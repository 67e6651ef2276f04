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
        put: Called with `KeyboardInterrupt`, the class, at each Ctrl-C.
    """
    with _handled(lambda: put(KeyboardInterrupt)):
        yield


@contextlib.contextmanager
def deferred() -> Iterator[None]:
    """Ctrl-C in the body, which has to be short, comes at its end."""
    asked: list[None] = []
    with _handled(lambda: asked.append(None)):
        yield
    if asked:
        raise KeyboardInterrupt


@contextlib.contextmanager
def _handled(on_interrupt: Callable[[], None]) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():  # others get none
        yield
        return
    before = signal.signal(signal.SIGINT, lambda signum, frame: on_interrupt())
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
