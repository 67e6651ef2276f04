"""Messages on their way to the controller: large ones in parts, and nothing out of bounds."""

from __future__ import annotations

import os
from collections.abc import Iterator

import msgspec
import pytest
import zmq

from nbdist.wire.base.keys import Keys
from nbdist.wire.base.message import VERSION, Hello
from nbdist.wire.frames import decode, encode
from nbdist.wire.lanes import LARGEST_FRAME, Lane, connect, pack, unpack, whole
from nbdist.wire.messages.output import Credit
from nbdist.wire.questions.questions import WatchNodes


class Pair:
    """A lane and the socket that it leads to."""

    def __init__(self) -> None:
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        public, secret = zmq.curve_keypair()
        self.router = self.context.socket(zmq.ROUTER)
        self.router.curve_server = True
        self.router.curve_publickey, self.router.curve_secretkey = public, secret
        self.router.maxmsgsize = LARGEST_FRAME + 1024
        port = self.router.bind_to_random_port("tcp://127.0.0.1")
        keys = Keys(f"tcp://127.0.0.1:{port}", public, *zmq.curve_keypair())
        lane = connect(self.context, keys, b"lane")
        assert isinstance(lane, Lane)
        self.lane = lane
        self.received()  # its Hello

    def received(self) -> list[bytes]:
        assert self.router.poll(20_000)
        _, *frames = self.router.recv_multipart()
        return list(whole(frames))


@pytest.fixture
def pair() -> Iterator[Pair]:
    pair = Pair()
    yield pair
    pair.context.destroy(linger=0)


@pytest.mark.parametrize("size", [1, LARGEST_FRAME, LARGEST_FRAME + 1, 5 * LARGEST_FRAME, 9_999_999])
def test_a_message_of_any_size_arrives_whole(pair: Pair, size: int) -> None:
    message = b"\x92" + os.urandom(size - 1)
    pair.lane.send(message)
    assert pair.received() == [message]


def test_messages_that_are_sent_together_arrive_in_order_whatever_their_sizes(pair: Pair) -> None:
    messages = [b"a", b"b" * (LARGEST_FRAME + 5), b"c", b"d" * (3 * LARGEST_FRAME)]
    pair.lane.send_multipart(messages)
    assert pair.received() == messages


def test_a_message_that_an_interrupt_has_cut_is_dropped_and_the_next_arrives(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, sent = zmq.Socket.send, []

    def interrupted(self: zmq.Socket[bytes], *args: object) -> object:
        sent.append(args)
        if len(sent) == 3:
            raise KeyboardInterrupt
        return real(self, *args)  # type: ignore[call-overload]

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(zmq.Socket, "send", interrupted)
        pair.lane.send(b"x" * (5 * LARGEST_FRAME))
    pair.lane.send(b"next")
    assert pair.received() == []
    assert pair.received() == [b"next"]


@pytest.mark.parametrize("frames", [[b""], [b"\xc1"], [b"\xc1" + b"\xff" * 8, b"x"], [b"\xc1" + b"\xff" * 90]])
def test_parts_that_were_never_there_make_up_no_message(frames: list[bytes]) -> None:
    assert [message for message in whole(frames) if message] == []


@pytest.mark.parametrize(
    "message", [Credit(0, -1), WatchNodes(float("nan")), WatchNodes(-1.0), WatchNodes(float("inf"))]
)
def test_what_is_out_of_bounds_is_refused(message: Credit | WatchNodes) -> None:
    with pytest.raises(msgspec.ValidationError):
        decode(encode(message))


def test_messages_of_several_ranks_are_packed_with_their_lanes() -> None:
    messages = [(b"rank.cell/1/0", b"first"), (b"rank.cell/1/1", b"")]
    assert list(unpack(pack(messages))) == messages


def test_what_is_not_packed_is_refused() -> None:
    with pytest.raises(msgspec.DecodeError):
        unpack(encode(Hello(VERSION, 1)))
