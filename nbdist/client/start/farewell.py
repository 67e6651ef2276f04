"""What becomes of the ranks when this process ends: it crashes, is restarted, or ends for good."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from nbdist import shells
from nbdist.base.checks import LONGEST
from nbdist.base.text import parse_duration
from nbdist.errors import UsageError
from nbdist.wire.messages.handover import Leaving

LINGER_VARIABLE = "NBDIST_LINGER"  # how long ranks outlive a crash, where nothing else is said
LINGER = 900.0  # seconds; of a notebook or a terminal. A script's cells can't be typed again: its ranks end with it
RESTART_LINGER = 60.0  # seconds that ranks outlive a kernel's restart

_restarting = False
_announcements: list[Callable[[], None]] = []


def linger_or_default(given: float | None) -> float:
    """Return how many seconds the ranks outlive a crash of this process.

    Raises:
        UsageError: NBDIST_LINGER is not a duration.
    """
    if given is not None:
        return given
    if text := os.environ.get(LINGER_VARIABLE, ""):
        seconds = parse_duration(text)
        if seconds is None or not 0 <= seconds <= LONGEST:
            raise UsageError(
                f"{LINGER_VARIABLE}={text!r} is not a duration: set it to, for example, 0, 90, 15m, or 12h"
            )
        return seconds
    return LINGER if shells.current() is not None else 0.0


def watch_kernel() -> None:
    """Learn from the kernel, if this is one, whether it is about to be restarted."""
    kernel: Any = getattr(shells.current(), "kernel", None)
    before = getattr(kernel, "do_shutdown", None)
    if before is None or getattr(before, "by_nbdist", False):
        return

    def do_shutdown(restart: bool) -> Any:
        global _restarting
        _restarting = bool(restart)
        for announce in _announcements:
            announce()
        return before(restart)

    do_shutdown.by_nbdist = True  # type: ignore[attr-defined]
    kernel.do_shutdown = do_shutdown


def before_end(announce: Callable[[], None]) -> Callable[[], None]:
    """Have a function called when the kernel is asked to end; in its control thread, while a cell may run."""
    _announcements.append(announce)
    return announce


def after_end(linger: float, keep: bool) -> tuple[float, Leaving]:
    """Return how many seconds ranks outlive the orderly end of this process (0: they end with it), and why.

    Args:
        linger: How long they outlive a crash.
        keep: Whether the user wants them kept.
    """
    if _restarting and not keep:
        return min(linger, RESTART_LINGER), "restarted"
    return (linger if keep else 0.0), "detached"
