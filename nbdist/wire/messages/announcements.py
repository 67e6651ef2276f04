"""What announces that the ranks are about to be ended from outside, by a scheduler for example."""

from __future__ import annotations

from typing import Literal

from nbdist.wire.base.message import Message, Seconds

SAVE_LEAD = 120.0  # seconds before an end by the clock when a session is saved, enough for some 70 GB a rank

EndSource = Literal["SIGUSR1", "SIGTERM", "clock", "idle"]
Recipient = Literal["controller", "agent", "rank", "notebook"]


class EndAnnounced(Message, frozen=True):
    """The allocation ends soon, or the session does.

    source: the signal that one of our processes got, a time that was known before, or that no cell runs. recipient,
    pid: that process. rank: if it is one. host: its machine; "": the notebook's. seconds: until the end; None: not
    known.
    """

    source: EndSource
    recipient: Recipient = "notebook"
    pid: int = 0
    rank: int = -1
    host: str = ""
    seconds: Seconds | None = None
