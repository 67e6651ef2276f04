"""Brings large values from the machine that they lie on to those that need them.

Between agents and this process, which holds what comes to the notebook's machine. Independent of what they are.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from nbdist.wire.base.message import Message
from nbdist.wire.base.parcel import Segment
from nbdist.wire.messages.chunks import Arrived, Chunk, Discard, Expect, Fetch, Spoiled, Taken
from nbdist.wire.segment_copies import GivenSegments, Incoming, Outgoing
from nbdist.wire.segments import Unreachable

Segments = list[Segment]


@dataclass
class _Delivery:
    """A value on its way to nodes."""

    source: GivenSegments
    outgoing: dict[int, Outgoing]  # by node, those that are not there yet
    done: Callable[[dict[int, Segments], str], None]
    there: dict[int, Segments] = field(default_factory=dict)


@dataclass
class _Collection:
    """A value on its way to this machine."""

    node: int
    incoming: Incoming
    done: Callable[[Segments, str], None]


class SegmentTransfers:
    """All values on their way, and those that have arrived.

    Args:
        send: Sends a message, or one that is encoded, to a node's agent, by the lane that is for this.
    """

    def __init__(self, send: Callable[[int, Message | bytes], None]) -> None:
        self._send = send
        self._keys = itertools.count(1)
        self._deliveries: dict[int, _Delivery] = {}
        self._collections: dict[int, _Collection] = {}
        self._here: dict[int, Incoming] = {}  # what was collected, until it is dropped

    def deliver(
        self, given: Sequence[Segment], nodes: Iterable[int], done: Callable[[dict[int, Segments], str], None]
    ) -> int:
        """Bring segments of this machine to nodes.

        Args:
            given: The segments.
            nodes: Where they are needed.
            done: Called with where they lie on each node, and why they could not be brought ("" if they were).

        Returns:
            A number to `drop` it by.
        """
        key = next(self._keys)
        try:
            source = GivenSegments(key, given)
        except (OSError, Unreachable) as error:
            done({}, str(error))
            return key
        delivery = self._deliveries[key] = _Delivery(source, {node: Outgoing(source) for node in nodes}, done)
        for node, outgoing in delivery.outgoing.items():
            self._send(node, Expect(key, [segment.size for segment in given]))
            self._go_on(node, outgoing)
        return key

    def fetch(self, given: Sequence[Segment], node: int, done: Callable[[Segments, str], None]) -> int:
        """Bring segments of a node here, as of `deliver`."""
        key = next(self._keys)
        try:
            incoming = Incoming([segment.size for segment in given])
        except OSError as error:
            done([], str(error))
            return key
        self._collections[key] = _Collection(node, incoming, done)
        self._send(node, Fetch(key, list(given)))
        return key

    def handle(self, node: int, message: Message) -> None:
        """Handle what a node's agent reports about a value."""
        if isinstance(message, Taken):
            delivery = self._deliveries.get(message.key)
            if delivery is not None and node in delivery.outgoing:
                self._go_on(node, delivery.outgoing[node], message.size)
        elif isinstance(message, Arrived):
            self._arrived(node, message)
        elif isinstance(message, Chunk):
            self._take(node, message)
        elif isinstance(message, Spoiled):
            delivery, collection = self._deliveries.get(message.key), self._collections.get(message.key)
            nodes = {*delivery.outgoing, *delivery.there} if delivery is not None else set()
            if node in nodes or (collection is not None and collection.node == node):
                self._spoil(message.key, message.why)

    def _go_on(self, node: int, outgoing: Outgoing, taken: int = 0) -> None:
        for chunk in outgoing.next_chunks(taken):
            self._send(node, chunk)

    def _arrived(self, node: int, message: Arrived) -> None:
        delivery = self._deliveries.get(message.key)
        if delivery is None or node not in delivery.outgoing:
            return
        del delivery.outgoing[node]
        delivery.there[node] = message.segments
        self._check_delivered(delivery)

    def _check_delivered(self, delivery: _Delivery) -> None:
        if not delivery.outgoing:
            delivery.source.close()
            delivery.done(delivery.there, "")

    def _take(self, node: int, chunk: Chunk) -> None:
        collection = self._collections.get(chunk.key)
        if collection is None or collection.node != node:
            return
        try:
            complete = collection.incoming.take(chunk)
        except OSError as error:
            self._spoil(chunk.key, str(error))
            return
        if not complete:
            self._send(node, Taken(chunk.key, len(chunk.data)))
            return
        self._send(node, Discard(chunk.key))
        self._here[chunk.key] = self._collections.pop(chunk.key).incoming
        collection.done(collection.incoming.segments, "")

    def _spoil(self, key: int, why: str) -> None:
        delivery, collection = self._deliveries.get(key), self._collections.get(key)
        self.drop(key)
        if delivery is not None:
            delivery.done({}, why)
        elif collection is not None:
            collection.done([], why)

    def lose(self, node: int) -> None:
        """Give up all that goes to a lost node or comes from it."""
        for delivery in list(self._deliveries.values()):
            if delivery.outgoing.pop(node, None) is not None:
                self._check_delivered(delivery)
        for key in [key for key, collection in self._collections.items() if collection.node == node]:
            self._spoil(key, f"node {node} is lost")

    def close(self) -> None:
        """Drop all."""
        for key in [*self._deliveries, *self._collections, *self._here]:
            self.drop(key)

    def drop(self, key: int) -> None:
        """Release a value, wherever it is."""
        if (delivery := self._deliveries.pop(key, None)) is not None:
            delivery.source.close()
            for node in {*delivery.outgoing, *delivery.there}:
                self._send(node, Discard(key))
        if (collection := self._collections.pop(key, None)) is not None:
            collection.incoming.close()
            self._send(collection.node, Discard(key))
        if (incoming := self._here.pop(key, None)) is not None:
            incoming.close()
