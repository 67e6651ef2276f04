"""What a start reports while it runs, and why it failed: text for people, and fields for code."""

from __future__ import annotations

from typing import Literal

from nbdist.errors import SessionBroken
from nbdist.text import counted
from nbdist.wire.life import Stage
from nbdist.wire.nodes import TOKEN_VARIABLE, Invited


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
    """The port that was named for the rendezvous store is taken; no rank is left."""


def invitation(message: Invited) -> str:
    """Say what the user has to do for other nodes to come."""
    lines = [f"  {TOKEN_VARIABLE}={token} nbdist join {message.address}" for token in message.tokens]
    where = "on the other machine" if len(lines) == 1 else "on the other machines, one line on each"
    return "\n".join([f"waiting for {counted(len(lines), 'more node')}: run this {where}", *lines])
