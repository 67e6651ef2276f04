"""A rank's displays count with all their bytes, so that none passes the credit."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import zmq

from nbdist.wire.base.message import MimeBundle
from nbdist.wire.frames import decode
from nbdist.wire.messages.output import Display, WidgetMessage
from nbdist.worker.lanes.display_lane import DisplayLane


@pytest.fixture
def wire() -> Iterator[tuple[DisplayLane, zmq.Socket[bytes]]]:
    """A lane, and the end where its messages come out."""
    with zmq.Context() as context, context.socket(zmq.PAIR) as ours, context.socket(zmq.PAIR) as theirs:
        theirs.bind("inproc://lane")
        ours.connect("inproc://lane")
        yield DisplayLane(ours, 0, b"token"), theirs


@pytest.mark.parametrize(
    ("data", "metadata"),
    [
        ({"text/html": "x" * 300_000}, {}),
        ({"application/json": {"x": ["y" * 1000] * 300}}, {}),
        ({"text/plain": ""}, {"x": "y" * 300_000}),
    ],
    ids=["text", "JSON", "metadata"],
)
def test_a_display_counts_with_all_that_it_sends(
    wire: tuple[DisplayLane, zmq.Socket[bytes]], data: MimeBundle, metadata: MimeBundle
) -> None:
    lane, end = wire
    lane.show("display", data, metadata)
    frame = end.recv()
    message = decode(frame)
    assert isinstance(message, Display) and len(frame) - 10 <= message.size <= len(frame)


def test_a_widget_message_counts_with_all_that_it_sends(wire: tuple[DisplayLane, zmq.Socket[bytes]]) -> None:
    lane, end = wire
    lane.relay("comm_msg", "id", "", {"state": {"value": "x" * 300_000}}, {}, [b"y" * 1000])
    message = decode(end.recv())
    assert isinstance(message, WidgetMessage) and 301_000 < message.size < 302_000
