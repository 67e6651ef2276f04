"""What all messages have in common, and the bounds of their values.

Values outside these bounds are refused when decoded.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from nbdist.base.checks import LONGEST

VERSION = 1

Seconds = Annotated[float, msgspec.Meta(ge=0, le=LONGEST)]
Size = Annotated[int, msgspec.Meta(ge=0, le=1 << 40)]
Whole = Annotated[int, msgspec.Meta(ge=0, le=1 << 16)]
Count = Annotated[int, msgspec.Meta(ge=1, le=1 << 16)]


class Message(msgspec.Struct, array_like=True, tag=True, frozen=True):
    """Base of all messages."""


class Hello(Message, frozen=True):
    """The first message on each connection."""

    version: int
    pid: int
