"""Saves a session that has no client when its end comes: a process of its own attaches to it, saves it, and leaves it.

Only a client knows how a session is saved; `nbdist save` is one. Not used while there is another.
"""

from __future__ import annotations

import math
import os
import subprocess
import time
from collections.abc import Callable

import zmq

from nbdist.base.processes import describe_exit, python_command
from nbdist.controller.clients.client_side import ClientSide
from nbdist.controller.ranks.rank_sets import RankSets
from nbdist.wire.messages.announcements import SAVE_LEAD

_AGAIN = 30.0  # seconds within which further signals are part of the same announcement
_SURE = 120.0  # seconds after an announcement in which a client that leaves may not have saved


class UnattendedSave:
    """The saves of one session, one at a time.

    Args:
        side: Knows whether there is a client.
        sets: Know the present ranks, and what the last client has chosen for them.
        poller: Which is to see what the process prints.
        session: The session's name.
        say: Keeps a line for the next client.

    Attributes:
        descriptor: Is ready when the process has printed something, or has ended; -1: there is none.
    """

    def __init__(
        self, side: ClientSide, sets: RankSets, poller: zmq.Poller, session: str, say: Callable[[str], None]
    ) -> None:
        self._side, self._sets, self._poller = side, sets, poller
        self._session = session
        self._say = say
        self.descriptor = -1
        self._process: subprocess.Popen[bytes] | None = None
        self._said = b""
        self._rests_until = 0.0
        self._announced_at = -math.inf

    def announced(self) -> None:
        """Save the session, as its end has been announced; with a client, only if that leaves soon.

        The client may have got the same signal, and end at once.
        """
        self._announced_at = time.monotonic()
        self._begin(self._announced_at + _AGAIN)

    def due(self) -> float:
        """Return the time of the next `tick`, while there is no client."""
        if not self._is_wanted():
            return math.inf
        if time.monotonic() - self._announced_at < _SURE and self._announced_at + _AGAIN > self._rests_until:
            return self._announced_at
        end = self._end()
        return math.inf if end <= self._rests_until else end - self._lead()

    def tick(self, now: float) -> None:
        """Save the session if it ends soon, by the clock or because nobody has come back."""
        due = self.due()
        if now >= due:
            self._begin(due + _AGAIN if due == self._announced_at else self._end() + 1.0)

    def read(self) -> None:
        """Take what the process has printed. To be called when `descriptor` is ready."""
        process = self._process
        assert process is not None and process.stdout is not None
        if found := os.read(self.descriptor, 1 << 16):
            self._said += found
            return
        self._poller.unregister(self.descriptor)
        process.stdout.close()
        code = process.wait()
        self._process, self.descriptor = None, -1
        said = self._said.decode(errors="replace").strip()
        self._say(said or f"the session could not be saved: `nbdist save` has ended ({describe_exit(code)})")

    def _is_wanted(self) -> bool:
        is_free = self._side.alone and self._process is None
        return is_free and self._sets.members is not None and bool(self._sets.choices.save)

    def _end(self) -> float:
        """Return when the ranks end, as far as that is known."""
        known = [self._side.leave_at or math.inf]
        at = self._sets.choices.ends_at
        if at is not None:
            known.append(time.monotonic() + at - time.time())
        return min(known)

    def _lead(self) -> float:
        return min(SAVE_LEAD, self._side.linger / 2) if self._side.leave_at == self._end() else SAVE_LEAD

    def _begin(self, rests_until: float) -> None:
        now = time.monotonic()
        if not self._is_wanted() or now < self._rests_until:
            return
        self._rests_until = rests_until
        left = max(1.0, (self._side.leave_at or now) - now)
        command = python_command(
            "nbdist.command", "save", self._session, self._sets.choices.save, "--stop", f"--left={left}"
        )
        self._said = b""
        self._process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, cwd="/"
        )
        assert self._process.stdout is not None
        self.descriptor = self._process.stdout.fileno()
        self._poller.register(self.descriptor, zmq.POLLIN)
