"""Large values on their way between machines: from an agent's storage to the controller, and back."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from nbdist.agent.storage import NodeStorage
from nbdist.controller.nodes.segment_transfers import SegmentTransfers
from nbdist.wire import segments
from nbdist.wire.base.message import Message
from nbdist.wire.base.parcel import Segment
from nbdist.wire.frames import decode

SIZE = 9 << 20  # more than may be under way at once
DATA = os.urandom(1 << 10) * (SIZE >> 10)
Found = tuple[list[Segment], str]


class Way:
    """A controller's transfers and the storage of node 1, with what is sent between them."""

    def __init__(self) -> None:
        self.queue: list[tuple[bool, Message | bytes]] = []  # whether to the controller
        self.transfers = SegmentTransfers(lambda node, message: self.queue.append((False, message)))
        self.storage = NodeStorage(lambda message: self.queue.append((True, message)))
        self.largest = 0

    def carry(self, messages: int = 1 << 20) -> None:
        while self.queue and messages:
            up, sent = self.queue.pop(0)
            message = as_message(sent)
            self.largest = max(self.largest, len(self.queue))
            if up:
                self.transfers.handle(1, message)
            else:
                self.storage.handle(message)
            messages -= 1


@pytest.fixture
def value() -> Iterator[Segment]:
    descriptor = segments.create()
    os.write(descriptor, DATA)
    segments.seal(descriptor)
    yield segments.segment_of(descriptor)
    os.close(descriptor)


def as_message(sent: Message | bytes) -> Message:
    return decode(sent) if isinstance(sent, bytes) else sent


def read(segment: Segment) -> bytes:
    descriptor = segments.open_segment(segment)
    try:
        return os.pread(descriptor, segment.size, 0)
    finally:
        os.close(descriptor)


def test_a_value_gets_to_a_node_whole(value: Segment) -> None:
    way, found = Way(), list[tuple[dict[int, list[Segment]], str]]()
    key = way.transfers.deliver([value], [1], lambda there, why: found.append((there, why)))
    way.carry()
    [(there, why)] = found
    assert not why and read(there[1][0]) == DATA
    way.transfers.drop(key)
    way.carry()
    with pytest.raises(segments.Unreachable):
        segments.open_segment(there[1][0])


def test_a_value_gets_whole_to_nodes_that_are_not_equally_fast(value: Segment) -> None:
    queues: dict[int, list[Message]] = {1: [], 2: []}
    found: list[dict[int, list[Segment]]] = []

    def send(node: int, message: Message | bytes) -> None:
        queues[node].append(as_message(message))

    transfers = SegmentTransfers(send)
    storages = {
        1: NodeStorage(lambda message: transfers.handle(1, as_message(message))),
        2: NodeStorage(lambda message: transfers.handle(2, as_message(message))),
    }
    key = transfers.deliver([value], [1, 2], lambda there, why: found.append(there))
    for node in (1, 2):  # the first has all before the second has begun
        while queues[node]:
            storages[node].handle(queues[node].pop(0))
    assert [read(found[0][node][0]) == DATA for node in (1, 2)] == [True, True]
    transfers.drop(key)
    for node in (1, 2):
        storages[node].handle(queues[node].pop(0))


def test_no_more_is_under_way_than_allowed(value: Segment) -> None:
    way = Way()
    way.transfers.deliver([value], [1], lambda there, why: None)
    way.carry()
    assert way.largest * (120 << 10) < 2 * (4 << 20)


def test_a_value_that_has_come_stays_when_its_node_is_lost(value: Segment) -> None:
    way, found = Way(), list[Found]()
    way.transfers.fetch([value], 1, lambda there, why: found.append((there, why)))
    way.carry()
    way.transfers.lose(1)
    [(there, why)] = found
    assert not why and read(there[0]) == DATA


def test_a_value_that_is_coming_is_given_up_with_its_node(value: Segment) -> None:
    way, found = Way(), list[Found]()
    way.transfers.fetch([value], 1, lambda there, why: found.append((there, why)))
    way.carry(5)
    way.transfers.lose(1)
    way.carry()
    assert found == [([], "node 1 is lost")]


def test_a_delivery_waits_for_no_node_that_is_lost(value: Segment) -> None:
    way, found = Way(), list[tuple[dict[int, list[Segment]], str]]()
    way.transfers.deliver([value], [1, 2], lambda there, why: found.append((there, why)))
    way.transfers.lose(2)
    way.carry()
    assert [sorted(there) for there, _ in found] == [[1]]


def test_a_value_whose_sender_has_ended_is_an_error(value: Segment) -> None:
    way, found = Way(), list[Found]()
    gone = Segment(value.pid, value.fd, value.inode + 1, value.size)
    way.transfers.fetch([gone], 1, lambda there, why: found.append((there, why)))
    way.carry()
    [(there, why)] = found
    assert not there and "another file" in why
