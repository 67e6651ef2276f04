"""Tells pages how the session is, whenever that has changed.

A page could ask, but each question makes JupyterLab take the kernel for idle while a cell runs. So a thread looks, as
long as there are pages.
"""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable

from msgspec.structs import replace

from nbdist.wire.pages.page_messages import SessionState

_PERIOD = 0.25  # seconds between two looks, at what this process knows anyway

Send = Callable[[SessionState], None]


class StateWatch:
    """Calls its subscribers with the state of the session.

    Args:
        look: Returns it.
    """

    def __init__(self, look: Callable[[], SessionState]) -> None:
        self._look = look
        self._subscribers: dict[str, Send] = {}  # by page
        self._told: dict[str, SessionState] = {}  # what each has been sent last
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    def subscribe(self, page: str, send: Send) -> Callable[[], None]:
        """Call this with the state now, and whenever it has changed. Returns what ends that."""
        with self._changed:
            self._subscribers[page] = send
            self._told.pop(page, None)
            if self._thread is None:
                # What is sent here is nobody's answer, so the thread has a context of its own.
                run = contextvars.Context().run
                self._thread = threading.Thread(target=run, args=(self._run,), name="nbdist-pages", daemon=True)
                self._thread.start()

        def unsubscribe() -> None:
            with self._changed:
                if self._subscribers.get(page) is send:
                    del self._subscribers[page]
                    self._told.pop(page, None)
                self._changed.notify_all()

        return unsubscribe

    def told(self, page: str, state: SessionState) -> None:
        """Note what a page got with an answer: that may be of a moment ago, and then the page is told again."""
        with self._changed:
            if page in self._told:
                self._told[page] = _without_clock(state)

    def _run(self) -> None:
        while True:
            state = self._look()
            known = _without_clock(state)
            with self._changed:
                if not self._subscribers:
                    self._thread = None
                    return
                behind = [send for page, send in self._subscribers.items() if self._told.get(page) != known]
                self._told = dict.fromkeys(self._subscribers, known)
            for send in behind:
                send(state)
            with self._changed:
                self._changed.wait_for(lambda: not self._subscribers, _PERIOD)


def _without_clock(state: SessionState) -> SessionState:
    return replace(state, cells=[replace(cell, seconds=0.0) for cell in state.cells])
