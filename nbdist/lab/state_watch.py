"""Tells pages how the session is, whenever that has changed.

A page could ask, but each question makes JupyterLab take the kernel for idle while a cell runs. So a thread looks, as
long as there are pages.
"""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable

from msgspec.structs import replace

from nbdist.lab.page_messages import SessionState

_PERIOD = 0.25  # seconds between two looks, at what this process knows anyway

Send = Callable[[SessionState], None]


class StateWatch:
    """Calls its subscribers with the state of the session.

    Args:
        look: Returns it.
    """

    def __init__(self, look: Callable[[], SessionState]) -> None:
        self._look = look
        self._subscribers: dict[object, Send] = {}
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    def subscribe(self, send: Send) -> Callable[[], None]:
        """Call this with the state now, and whenever it has changed. Returns what ends that."""
        key = object()
        with self._changed:
            self._subscribers[key] = send
            if self._thread is None:
                # What is sent here is nobody's answer, so the thread has a context of its own.
                run = contextvars.Context().run
                self._thread = threading.Thread(target=run, args=(self._run,), name="nbdist-pages", daemon=True)
                self._thread.start()

        def unsubscribe() -> None:
            with self._changed:
                self._subscribers.pop(key, None)
                self._changed.notify_all()

        return unsubscribe

    def _run(self) -> None:
        told: dict[object, SessionState] = {}
        while True:
            state = self._look()
            known = replace(state, cells=[replace(cell, seconds=0.0) for cell in state.cells])
            with self._changed:
                subscribers = dict(self._subscribers)
                if not subscribers:
                    self._thread = None
                    return
            for key, send in subscribers.items():
                if told.get(key) != known:
                    send(state)
            told = dict.fromkeys(subscribers, known)
            with self._changed:
                self._changed.wait_for(lambda: not self._subscribers, _PERIOD)
