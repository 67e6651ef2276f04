"""A living session in a terminal: `nbdist attach`, a prompt whose cells run on its ranks, and `nbdist follow`."""

from __future__ import annotations

from nbdist.base.text import span
from nbdist.client.session.following import Following
from nbdist.client.session.session import Session
from nbdist.errors import SessionClosed


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
