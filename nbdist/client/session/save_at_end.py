"""Saves a session whose end was announced, if it has a folder for that: `%distributed start --save DIR`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from nbdist.client.saving.save import SaveReport
from nbdist.errors import NbdistError
from nbdist.wire.messages.announcements import EndAnnounced


class Savable(Protocol):
    """A session, as far as its end needs it."""

    @property
    def saves_to(self) -> str:
        """The folder for a save at the end; "": there is to be none."""

    def save(self, directory: str, *, stop: bool) -> SaveReport:
        """Save it; `stop`: stop first what ranks run."""


def save_at_end(session: Savable, say: Callable[[str], None], *, stop: bool) -> bool:
    """Save a session as its end has come, and say what was saved, or why it could not be. Returns whether it was.

    Args:
        session: The session.
        say: Shows the user a line.
        stop: Whether to stop first what ranks run.
    """
    try:
        report = session.save(session.saves_to, stop=stop)
    except NbdistError as error:
        say(f"the session was not saved before its end: {error}")
        return False
    say(str(report))
    return True


def describe_save(directory: str, announcement: EndAnnounced) -> str:
    """Return what is going to be saved, for the line that announces an end."""
    if announcement.source == "clock":
        return f"Two minutes before it, the ranks stop, and the session is saved to {directory}."
    if announcement.source == "idle":
        return f"The session is then saved to {directory}."
    return f"The ranks stop, and the session is saved to {directory}."
