"""What values that come from other machines lie in on this node, and what is read here for them.

Independent of what the values are.
"""

from __future__ import annotations

from collections.abc import Callable

from nbdist.wire.base.message import Message
from nbdist.wire.messages.chunks import Arrived, Chunk, Discard, Expect, Fetch, Spoiled, Taken
from nbdist.wire.segment_copies import GivenSegments, Incoming, Outgoing
from nbdist.wire.segments import Unreachable


class NodeStorage:
    """The parcels of this node.

    Args:
        send: Sends a message, or one that is encoded, to the controller, by the lane that is for this.
    """

    def __init__(self, send: Callable[[Message | bytes], None]) -> None:
        self._send = send
        self._incoming: dict[int, Incoming] = {}
        self._outgoing: dict[int, tuple[GivenSegments, Outgoing]] = {}

    def handle(self, message: Message) -> None:
        """Do what the controller says."""
        key = getattr(message, "key", 0)
        try:
            if isinstance(message, Expect):
                self._incoming[key] = Incoming(message.sizes)
            elif isinstance(message, Chunk):
                self._take(message)
            elif isinstance(message, Fetch):
                source = GivenSegments(key, message.segments)
                self._outgoing[key] = source, Outgoing(source)
                self._go_on(key, 0)
            elif isinstance(message, Taken):
                self._go_on(key, message.size)
            elif isinstance(message, Discard):
                self._discard(key)
        except (OSError, Unreachable) as error:
            self._discard(key)
            self._send(Spoiled(key, str(error)))

    def _take(self, chunk: Chunk) -> None:
        incoming = self._incoming.get(chunk.key)
        if incoming is None:  # given up meanwhile
            return
        complete = incoming.take(chunk)
        self._send(Taken(chunk.key, len(chunk.data)))
        if complete:
            self._send(Arrived(chunk.key, incoming.segments))

    def _go_on(self, key: int, taken: int) -> None:
        if (found := self._outgoing.get(key)) is not None:
            for chunk in found[1].next_chunks(taken):
                self._send(chunk)

    def _discard(self, key: int) -> None:
        if (incoming := self._incoming.pop(key, None)) is not None:
            incoming.close()
        if (found := self._outgoing.pop(key, None)) is not None:
            found[0].close()
