"""Saves a session whose end was announced, if it has a folder for that: `%distributed start --save DIR`."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from nbdist.client.saving.save import SaveReport
from nbdist.errors import NbdistError
from nbdist.wire.messages.announcements import EndAnnounced

LEAD = 120.0  # seconds before an end by the clock, enough for some 60 GB a rank
_PERIOD = 5.0  # seconds between two looks at the clock, which others may set


class Savable(Protocol):
    """A session, as far as its end needs it."""

    @property
    def saves_to(self) -> str:
        """The folder for a save at the end; "": there is to be none."""

    @property
    def time_left(self) -> float | None:
        """Seconds until the end; None: that is not known."""

    @property
    def closed(self) -> bool:
        """Whether it has no ranks."""

    def save(self, directory: str, *, stop: bool) -> SaveReport:
        """Save it; `stop`: stop first what ranks run."""


def save_at_end(session: Savable, announcement: EndAnnounced, say: Callable[[str], None]) -> None:
    """Save a session before its announced end, in this thread: at once, or shortly before an end by the clock.

    Idle ranks are saved when they end.

    Args:
        session: The session, whose ranks may be running a cell.
        announcement: What announced the end.
        say: Shows the user a line.
    """
    if announcement.source == "idle" or (announcement.source == "clock" and not _await_lead(session)):
        return
    save_now(session, say, stop=True)


def save_now(session: Savable, say: Callable[[str], None], *, stop: bool) -> None:
    """Save a session as its end has come, and say what was saved, or why it could not be.

    Args:
        session: The session.
        say: Shows the user a line.
        stop: Whether to stop first what ranks run.
    """
    try:
        say(str(session.save(session.saves_to, stop=stop)))
    except NbdistError as error:
        say(f"the session was not saved before its end: {error}")


def _await_lead(session: Savable) -> bool:
    """Wait until little time is left. Returns whether that has come; False: the end was put off, or the ranks ended."""
    rest = threading.Event()
    first = session.time_left
    while not session.closed and (left := session.time_left) is not None:
        if left <= LEAD:
            return True
        if first is not None and left > first:
            return False
        rest.wait(min(_PERIOD, left - LEAD))
    return False


def describe_save(directory: str, announcement: EndAnnounced) -> str:
    """Return what is going to be saved, for the line that announces an end."""
    place = Path(directory)
    if announcement.source == "clock":
        return f"Two minutes before it, the ranks stop, and the session is saved to {place}."
    if announcement.source == "idle":
        return f"The session is then saved to {place}."
    return f"The ranks stop, and the session is saved to {place}."
