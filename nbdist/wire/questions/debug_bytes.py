"""Questions by which the notebook's debugger reaches debugpy on a rank of another machine."""

from __future__ import annotations

from nbdist.wire.questions.question import AnswerBody, Done, Question


class DebugBytes(AnswerBody, frozen=True):
    """What debugpy has sent next; b"" if its connection has ended."""

    data: bytes


class OpenDebugger(Question[DebugBytes], frozen=True):
    """Connect to this rank's debugpy, and answer with all that it sends, again and again until b"".

    port: where it listens on the rank's own machine.
    """

    port: int


class TellDebugger(Question[Done], frozen=True):
    """Send this to debugpy; b"" ends the connection."""

    data: bytes
