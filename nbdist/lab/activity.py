"""A kernel whose ranks run a cell is in use, also if it prints nothing: the Jupyter server must not end it as idle.

The server takes the time of the kernel's last message for its last activity, and with `cull_idle_timeout` ends kernels
for which that is long ago. So while ranks run something, a message goes out that no page shows.
"""

from __future__ import annotations

import contextvars
import secrets
import threading
import weakref

from nbdist import shells
from nbdist.client.ranks import observers
from nbdist.client.ranks.observers import Observer
from nbdist.client.ranks.task_record import TaskRecord
from nbdist.client.session.session import known_sessions, rank_set_of
from nbdist.panel.control_comms import ControlLine

PERIOD = 60.0  # seconds between two messages; cullers count in minutes


def publish() -> None:
    """Publish the activity of ranks from now on, for as long as this kernel lives."""
    activity = _Activity()
    observers.subscribe(activity)
    # What is sent there is nobody's answer, so the thread has a context of its own.
    threading.Thread(target=contextvars.Context().run, args=(activity.run,), name="nbdist-active", daemon=True).start()


class _Activity(Observer):
    """Whether ranks of this kernel run anything, those of a launch included."""

    def __init__(self) -> None:
        self._tasks: weakref.WeakSet[TaskRecord] = weakref.WeakSet()  # that somebody waits for
        self._line = ControlLine(shells.current().kernel, secrets.token_hex(16))  # pages drop what is on no comm

    def cell_began(self, task: TaskRecord) -> None:
        self._tasks.add(task)

    def cell_ended(self, task: TaskRecord) -> None:
        self._tasks.discard(task)

    def run(self) -> None:
        """Publish, in a thread of its own."""
        rest = threading.Event()
        while not rest.wait(PERIOD):
            if self._tasks or _sessions_run():
                self._line.send({})


def _sessions_run() -> bool:
    """Return whether ranks of a session run a cell: also one that was taken over, or that nobody waits for."""
    sets = [rank_set_of(session) for session in known_sessions() if not session.closed]
    return any(each.traffic.running(info.rank for info in each.ranks) for each in sets)
