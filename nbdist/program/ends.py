"""How a run ends from outside: Ctrl-C and SIGTERM both end it in good order, each with its own exit code."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from types import FrameType


class Terminated(KeyboardInterrupt):
    """Raised in the main thread for SIGTERM, which then does what Ctrl-C does."""


@contextlib.contextmanager
def terminable() -> Iterator[None]:
    """Have SIGTERM raise in the body. A second one while the first is dealt with changes nothing."""

    def end(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise Terminated

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def exit_code(interrupt: KeyboardInterrupt) -> int:
    """Return the exit code after an interrupt, as shells have it."""
    return 128 + (signal.SIGTERM if isinstance(interrupt, Terminated) else signal.SIGINT)
