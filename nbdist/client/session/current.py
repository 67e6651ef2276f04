"""Which session of this notebook is meant where none is named."""

from __future__ import annotations

import os
import threading

from nbdist.base.end_signals import EndSignal, EndSignals
from nbdist.client.session.session import Session, end_of, known_sessions, rank_set_of
from nbdist.devices import visible_gpus
from nbdist.errors import SessionBroken, SessionClosed
from nbdist.wire.messages.announcements import EndAnnounced


def get_session() -> Session:
    """Return the session of this notebook.

    Raises:
        SessionClosed: There is none.
        SessionBroken: A process that it needs has ended. `restart()` of the Session works.
    """
    session = current_session()
    if session is not None and session.broken:
        raise SessionBroken(session.broken)
    if session is not None and rank_set_of(session).left:
        raise SessionClosed(rank_set_of(session).left)
    if session is None or session.closed:
        count = len(visible_gpus()) or 2
        raise SessionClosed(
            f"no session is running: type `%distributed start -n {count}` first (or `nbdist.Session({count})`)"
        )
    return session


def current_session() -> Session | None:
    """Return the newest session of this notebook that has not been closed, else the newest."""
    known = known_sessions()
    going = [session for session in known if not session.closed or session.broken]
    return going[-1] if going else known[-1] if known else None


def living_session() -> Session | None:
    """Return the session of this notebook, if it has one that has not ended."""
    session = current_session()
    return None if session is None or session.closed else session


def session_to_restart() -> Session:
    """Return the session like `get_session`, but also one that broke."""
    session = current_session()
    return session if session is not None and session.broken else get_session()


def attach(name: str | None = None, *, take: bool = False, keep: bool | None = None) -> Session:
    """Take over a living session: `Session.attach`."""
    return Session.attach(name, take=take, keep=keep)


def survive_warnings() -> None:
    """Have SIGUSR1, by which schedulers announce an end, not end this kernel: its sessions are told."""
    if threading.current_thread() is threading.main_thread():
        EndSignals(_announce)


def _announce(name: EndSignal, seconds: float | None) -> None:
    for session in known_sessions():
        if not session.closed:
            end_of(session).hear(EndAnnounced(name, "notebook", os.getpid(), seconds=seconds))
