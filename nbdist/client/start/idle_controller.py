"""The controller that is kept warm, with its agent and template, so that the next ranks start at once."""

from __future__ import annotations

import contextlib

from nbdist.base.checks import is_on
from nbdist.client.start.connection import Connection
from nbdist.errors import SessionBroken

_idle: Connection | None = None


def prewarm() -> None:
    """Start a controller with its agent and template, unless there is one, so that the next session starts at once.

    Does nothing with NBDIST_PREWARM=0.
    """
    global _idle
    if is_on("NBDIST_PREWARM", default=True) and (_idle is None or not _idle.alive):
        with contextlib.suppress(SessionBroken):  # `start` will report it
            _idle = Connection(patient=True)


def take() -> Connection | None:
    """Return the idle controller, which is no longer idle then; None if there is none."""
    global _idle
    if _idle is None or not _idle.alive:
        return None
    taken, _idle = _idle, None
    return taken


def keep(connection: Connection) -> None:
    """Keep a controller whose ranks have ended, unless there is an idle one already."""
    global _idle
    if _idle is None or not _idle.alive:
        _idle = connection
    else:
        connection.close()


def close() -> None:
    """End the idle controller."""
    if _idle is not None:
        _idle.close()
