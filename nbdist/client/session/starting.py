"""What a start reports while it runs, and why it failed: text for people, and fields for code."""

from __future__ import annotations

from typing import Literal

from nbdist.errors import SessionBroken
from nbdist.wire.life import Stage


class StartLine(str):
    """A line of text from a start.

    Attributes:
        stage: What the start was doing; "note" for a note when it is done.
    """

    stage: Stage | Literal["note"]

    def __new__(cls, text: str, stage: Stage | Literal["note"] = "note") -> StartLine:
        """Create the line; a `str` takes its text here."""
        line = super().__new__(cls, text)
        line.stage = stage
        return line


class PortTaken(SessionBroken):
    """The port given for the rendezvous store is taken; no rank is left."""
