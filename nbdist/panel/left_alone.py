"""Sessions on this machine that have no client: what they hold is missing elsewhere, and a reader may look for it."""

from __future__ import annotations

import os
import threading
import time

from nbdist.visits import client_of, of_this_machine

_EVERY = 10.0  # seconds between two looks
_NAMED = 2  # sessions


class LeftAlone:
    """What such sessions hold, as of some seconds ago. Looks in a thread of its own: one that is stuck answers late."""

    def __init__(self) -> None:
        self._words = ""
        self._due = 0.0
        self._looking = threading.Lock()

    def words(self) -> str:
        """Return what is known, at once; "" if there are none. Has it looked up where it is old."""
        if time.monotonic() >= self._due and self._looking.acquire(blocking=False):
            threading.Thread(target=self._look, name="nbdist-left-alone", daemon=True).start()
        return self._words

    def _look(self) -> None:
        try:
            found = [each for each in of_this_machine(but_of=os.getpid()) if each.lonely]
            words = [
                f"session {each.name} ({client_of(each.description)}) holds {each.holds}"
                for each in found[:_NAMED]
                if each.description is not None
            ]
            rest = [f"{len(found) - _NAMED} more sessions"] if len(found) > _NAMED else []
            self._words = ", ".join([*words, *rest])
        finally:
            self._due = time.monotonic() + _EVERY
            self._looking.release()
