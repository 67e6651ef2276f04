"""How the segments of a parcel get from one machine to another: in chunks, between the controller and an agent."""

from __future__ import annotations

from nbdist.wire.base.message import Message, Size
from nbdist.wire.base.parcel import Segment

CHUNK = 120 << 10  # bytes; with its envelope no larger than the largest frame
WINDOW = 4 << 20  # bytes that may be under way


class Expect(Message, frozen=True):
    """Segments of these sizes are to come, by the name `key`."""

    key: int
    sizes: list[Size]


class Chunk(Message, frozen=True):
    """Some bytes of the segment `number`."""

    key: int
    number: int
    offset: Size
    data: bytes


class Taken(Message, frozen=True):
    """So many bytes more have been written where they belong."""

    key: int
    size: Size


class Arrived(Message, frozen=True):
    """All is there, and here it lies on this machine."""

    key: int
    segments: list[Segment]


class Fetch(Message, frozen=True):
    """Send these segments of a process of yours."""

    key: int
    segments: list[Segment]


class Spoiled(Message, frozen=True):
    """It can't be sent or kept, and why."""

    key: int
    why: str


class Discard(Message, frozen=True):
    """Nobody needs it any more."""

    key: int
