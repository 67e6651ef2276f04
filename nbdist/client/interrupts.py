"""Ctrl-C: in words, and where it must not strike in the middle."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator


def interruption(text: str, *details: str) -> KeyboardInterrupt:
    """KeyboardInterrupt that the notebook shows as one line, and lines of details, instead of frames of ours."""
    made = KeyboardInterrupt(text)
    lines = [f"KeyboardInterrupt: {text}", *details]
    made._render_traceback_ = lambda: lines  # type: ignore[attr-defined]
    return made


@contextlib.contextmanager
def deferred() -> Iterator[None]:
    """Ctrl-C in the body, which has to be short, comes at its end."""
    if threading.current_thread() is not threading.main_thread():  # others get none
        yield
        return
    asked: list[int] = []
    before = signal.signal(signal.SIGINT, lambda signum, frame: asked.append(signum))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if asked:
        raise KeyboardInterrupt
