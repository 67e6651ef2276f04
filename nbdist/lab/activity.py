"""A kernel whose ranks run a cell is in use, also if it prints nothing: the Jupyter server must not end it as idle.

The server takes the time of the kernel's last message for its last activity. With a limit (cull_idle_timeout), it ends
kernels for which that is long ago. So while ranks run something, a message goes out that no page shows.
"""

from __future__ import annotations

import contextvars
import secrets
import threading

from nbdist import shells
from nbdist.client.ranks.rank_set import RankSet
from nbdist.panel.control_comms import ControlLine

PERIOD = 60.0  # seconds between two messages; cullers count in minutes


def publish() -> None:
    """Publish the activity of ranks from now on, for as long as this kernel lives."""
    line = ControlLine(shells.current().kernel, secrets.token_hex(16))  # pages drop what is on no comm of theirs
    # What is sent there is nobody's answer, so the thread has a context of its own.
    threading.Thread(target=contextvars.Context().run, args=(_run, line), name="nbdist-active", daemon=True).start()


def _run(line: ControlLine) -> None:
    rest = threading.Event()
    while not rest.wait(PERIOD):
        if any(_is_busy(each) for each in list(RankSet.instances.values())):
            line.send({})


def _is_busy(rank_set: RankSet) -> bool:
    """Return whether any rank of a session or a launch runs something, whoever waits for it."""
    return not rank_set.closed and bool(rank_set.traffic.running(info.rank for info in rank_set.ranks))
