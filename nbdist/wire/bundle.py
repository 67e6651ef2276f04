"""Messages that are sent together: those of several ranks that differ only in the rank become one.

What each rank has sent stays in its order. What several ranks have sent has no order among them.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator

from nbdist.wire.alike import Alike
from nbdist.wire.base.message import Message
from nbdist.wire.frames import AnyMessage, decode, encode
from nbdist.wire.messages.cells import Reply
from nbdist.wire.messages.output import Output


class Bundle:
    """Messages that gather until they are sent."""

    def __init__(self) -> None:
        self._parts: list[bytes | Alike] = []
        self._shared: dict[Hashable, int] = {}  # by what equal messages have alike, the part that others may join
        self._last: dict[int, int] = {}  # by rank, the last part that it has joined

    def __bool__(self) -> bool:
        return bool(self._parts)

    def add(self, message: Message) -> None:
        """Add a message, behind those that it must not overtake."""
        if not isinstance(message, Output | Reply) or (alike := _likeness(message)) is None:
            self._parts.append(encode(message))
            self._shared.clear()
            return
        place = self._shared.get(alike, -1)
        if place <= self._last.get(message.rank, -1):
            place = self._shared[alike] = len(self._parts)
            self._parts.append(Alike([], message))
        part = self._parts[place]
        assert isinstance(part, Alike)
        part.ranks.append(message.rank)
        self._last[message.rank] = place

    def take(self) -> list[bytes]:
        """Return the frames to be sent, and start again."""
        parts, self._parts = self._parts, []
        self._shared.clear()
        self._last.clear()
        return [_frame(part) for part in parts]


def unbundled(frame: bytes) -> Iterator[AnyMessage]:
    """Yield the messages in a frame of a bundle.

    Raises:
        msgspec.DecodeError: The frame isn't one of ours.
    """
    message = decode(frame)
    if isinstance(message, Alike):
        yield from message.each()
    else:
        yield message


def _likeness(message: Output | Reply) -> Hashable:
    """Return what such a message has in common with those of other ranks; None if that is hardly ever all of it."""
    if isinstance(message, Output):
        return message.stream, message.data, message.mark
    return message.serial if message == Reply(message.serial, message.rank, "ok") else None


def _frame(part: bytes | Alike) -> bytes:
    if isinstance(part, bytes):
        return part
    return encode(part if len(part.ranks) > 1 else part.message)
