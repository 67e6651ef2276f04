"""What all messages have in common, and the bounds of what they may hold.

What is out of these bounds is refused when it is decoded.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from nbdist.checks import LONGEST

VERSION = 1

Seconds = Annotated[float, msgspec.Meta(ge=0, le=LONGEST)]
Size = Annotated[int, msgspec.Meta(ge=0, le=1 << 40)]
Count = Annotated[int, msgspec.Meta(ge=1, le=1 << 16)]


class Message(msgspec.Struct, array_like=True, tag=True, frozen=True):
    """Base of all messages."""


class Hello(Message, frozen=True):
    """First message on each connection."""

    version: int
    pid: int
