"""The words for an end that was announced: of the allocation, or of the session."""

from __future__ import annotations

import time

from nbdist.base.text import span
from nbdist.wire.messages.announcements import EndAnnounced

_SOON = "The ranks' variables end with it: save what you need (`%distributed save DIR`)."


def describe_end(announcement: EndAnnounced, then: str = "") -> str:
    """Return the line for the notebook.

    Args:
        announcement: What announced the end.
        then: What is going to be done about it, in a sentence; "": nothing, so the user is to do something.
    """
    if announcement.source == "idle":
        ends = when(announcement.seconds or 0.0)
        return f"the ranks are idle, and end {ends} (`start --idle`). A cell on them prevents that. {then}".rstrip()
    then = then or _SOON
    if announcement.source == "clock":
        return f"the allocation ends {when(announcement.seconds or 0.0)}. {then}"
    reached = f"{announcement.source} has reached {_who(announcement)}"
    if announcement.seconds is None:
        return f"{reached}: the allocation ends soon. {then}"
    return f"{reached}: it ends in {span(announcement.seconds)}. {then}"


def when(seconds: float) -> str:
    """Return in how many seconds something is, and at what time: "in 10 min, at 18:00"."""
    at = time.localtime(time.time() + seconds)
    text = time.strftime("%H:%M" if seconds < 86400 else "%Y-%m-%d %H:%M", at)
    return f"in {span(max(0.0, seconds))}, at {text}"


def _who(announcement: EndAnnounced) -> str:
    """Return the process that was meant, and its machine."""
    names = {"rank": f"rank {announcement.rank}", "notebook": "the notebook's kernel"}
    name = names.get(announcement.recipient, f"the session's {announcement.recipient}")
    on = f" on {announcement.host}" if announcement.host else ""
    return f"{name} (pid {announcement.pid}){on}"
