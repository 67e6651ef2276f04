"""A living session in a terminal: `nbdist attach`, a prompt whose cells run on its ranks, and `nbdist follow`."""

from __future__ import annotations

import contextlib

from nbdist.base.text import span
from nbdist.client.session.following import Following
from nbdist.client.session.session import Session
from nbdist.errors import SessionClosed, SessionError, UsageError


def prompt(name: str | None, *, take: bool) -> None:
    """Take over a session, and run what is typed on its ranks until `exit`, which leaves them as they are.

    Args:
        name: The session's name, or the beginning of it; None: the only one that has no client.
        take: Whether to take it also from a client that is there.

    Raises:
        UsageError: There is no such session, or it can't be taken over; nothing has changed.
        SessionBroken: It does not answer.
    """
    from IPython import start_ipython
    from traitlets.config import Config

    session = Session.attach(name, take=take, keep=True)
    print("cells run on all ranks; `%%local` runs one here, `%distributed` shows more, `exit` leaves the ranks running")
    settings = Config()
    settings.TerminalIPythonApp.display_banner = False
    settings.TerminalInteractiveShell.confirm_exit = False
    settings.InteractiveShellApp.extensions = ["nbdist"]
    settings.InteractiveShellApp.exec_lines = ["%distributed auto on"]
    start_ipython(argv=[], config=settings)
    leave(session)


def follow(name: str | None) -> None:
    """Show what a session does until it ends, or Ctrl-C.

    Args:
        name: The session's name, or the beginning of it; None: the only one.

    Raises:
        UsageError: There is no such session, or several.
    """
    Following(name).wait()


def save(name: str, directory: str | None, *, keep: int, stop: bool, left: float | None) -> None:
    """Save a session that has no client, and leave it to whoever attaches.

    Args:
        name: The session's name, or the beginning of it.
        directory: Where saves are; None: as it was started with.
        keep: How many saves may stay there.
        stop: Whether to stop first what ranks run.
        left: Seconds that the ranks go on without anybody; None: as long as after a crash.

    Raises:
        UsageError: There is no such session, it has a client, or there is no folder; nothing has changed.
        SessionBusy: Ranks run something else than one cell that trains on all of them.
        CheckpointError: It could not be written; earlier saves are whole.
    """
    session = Session.attach(name, keep=True)
    try:
        if not (target := directory or session.saves_to):
            raise UsageError(f"session {session.name} was started without --save: `nbdist save {session.name} DIR`")
        print(session.save(target, keep=keep, stop=stop))
    finally:
        with contextlib.suppress(SessionError):  # it has ended
            session.detach(left)


def leave(session: Session) -> None:
    """Leave a session's ranks alone, if they are still this process's, and show how to come back."""
    try:
        seconds = session.detach()
    except SessionClosed:  # it was stopped, or another client has taken it
        return
    print(
        f"detached; the ranks keep running for {span(seconds)}: `nbdist attach {session.name}` comes back, "
        "`nbdist stop` ends them"
    )
