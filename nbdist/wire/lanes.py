"""The connections between client, controller, agent and ranks: their names, their encryption, and their contents.

Each process dials the controller's one ROUTER socket, once per lane, so that a flood on one lane never delays another.
A connection's identity is its lane: `client.events/0` (of the first client), `agent.control/0` (of node 0),
`rank.cell/2/3/0` (incarnation 2, rank 3, the first process in that place). Ranks of other nodes dial their own agent,
whose two relay lanes carry what they and the controller send. A message is one frame; on its way to the controller a
large one goes in several frames. CurveZMQ protects every hop.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import msgspec
import zmq

from nbdist.wire.base.keys import Keys
from nbdist.wire.base.message import VERSION, Hello
from nbdist.wire.frames import encode

CLIENT_COMMANDS = "client.commands"
CLIENT_EVENTS = "client.events"
GUEST = "guest"
VISITOR = "visitor"  # of somebody who has the notebook's key file
AGENT_CONTROL = "agent.control"
AGENT_OUTPUT = "agent.output"
AGENT_TRANSFERS = "agent.transfers"
AGENT_END = "agent.end"  # of whoever has started an agent, when that has ended
RELAY_CONTROL = "relay.control"
RELAY_OUTPUT = "relay.output"
RANK_CELL = "rank.cell"
RANK_CONTROL = "rank.control"
RANK_DISPLAY = "rank.display"
CLIENT_LANES = {CLIENT_COMMANDS, CLIENT_EVENTS}
FIRST_CLIENT = 0  # the one that has started the controller
RELAY_LANES = {RELAY_CONTROL, RELAY_OUTPUT}
NODE_LANES = {AGENT_CONTROL, AGENT_OUTPUT, AGENT_TRANSFERS, AGENT_END, *RELAY_LANES}
RANK_LANES = {RANK_CELL, RANK_CONTROL, RANK_DISPLAY}
LANES = CLIENT_LANES | NODE_LANES | RANK_LANES | {GUEST, VISITOR}

# The largest frame that the controller accepts. zmq allocates a frame's whole length as soon as its header has
# arrived, from anyone: this bounds what a connection without keys can cost.
LARGEST_FRAME = 128 << 10
HANDSHAKE_LIMIT = 3.0  # seconds that it may stay without keys
_IN_PARTS = b"\xc1"  # no message starts with this byte: it announces frames that make up one message


class LaneName(NamedTuple):
    """What a lane belongs to: a process of a rank; with incarnation -1 a client, a node, a guest or a visitor."""

    name: str
    incarnation: int = -1
    number: int = -1
    life: int = 0


def lane(name: str, incarnation: int, rank: int, life: int = 0) -> bytes:
    """Return the identity of a rank's connection. `life`: how many processes have had its place before."""
    return b"%s/%d/%d/%d" % (name.encode(), incarnation, rank, life)


def node_lane(name: str, node: int) -> bytes:
    """Return the identity of a connection that belongs to a node, a client, a guest or a visitor."""
    return b"%s/%d" % (name.encode(), node)


@functools.lru_cache(1 << 12)
def parse_lane(identity: bytes) -> LaneName:
    """Return what a lane belongs to.

    Raises:
        ValueError: It is not a lane.
    """
    name, *numbers = identity.decode().split("/")
    if name in LANES and len(numbers) == (3 if name in RANK_LANES else 1):
        if name not in RANK_LANES:
            return LaneName(name, -1, *map(int, numbers))
        return LaneName(name, *map(int, numbers))
    raise ValueError(f"{identity!r} is not a lane")


class Lane(zmq.Socket[bytes]):
    """A connection to the controller. Large messages are sent in parts."""

    _cut = False  # an exception, such as an interrupt, ended a message between its parts

    def send(self, data: Any, flags: int = 0, *args: Any, **kwargs: Any) -> Any:
        """Send a message, like `zmq.Socket.send`."""
        if self._cut:
            super().send(b"")
            self._cut = False
        if len(data) <= LARGEST_FRAME:
            return super().send(data, flags, *args, **kwargs)
        self._cut = True
        super().send(_IN_PARTS + len(data).to_bytes(8, "big"), zmq.SNDMORE)
        view = memoryview(data)
        while len(view) > LARGEST_FRAME:
            super().send(view[:LARGEST_FRAME], zmq.SNDMORE)
            view = view[LARGEST_FRAME:]
        tracker = super().send(view, flags)
        self._cut = False
        return tracker


def whole(frames: Iterable[bytes]) -> Iterator[bytes]:
    """Yield the messages in frames that a `Lane` sent together, without those that were cut off."""
    rest = iter(frames)
    for frame in rest:
        if frame[:1] != _IN_PARTS:
            if frame:
                yield frame
            continue
        size, parts = int.from_bytes(frame[1:], "big"), bytearray()
        while len(parts) < size and (part := next(rest, b"")):
            parts += part
        if len(parts) == size:
            yield bytes(parts)


def send_parts(socket: zmq.Socket[bytes], *parts: bytes) -> None:
    """Send a message of several frames, at half the cost of zmq's `send_multipart`, which also checks each frame."""
    *firsts, last = parts
    for part in firsts:
        socket.send(part, zmq.SNDMORE)
    socket.send(last)


TOGETHER = b"*"  # in place of a lane: what follows is what `pack` has made
PACKED = 1 << 10  # bytes of a message that is worth packing: larger ones cost more to copy than to receive
_messages = msgspec.msgpack.Decoder(list[bytes])


def pack(messages: Iterable[tuple[bytes, bytes]]) -> bytes:
    """Return messages, each with its lane, as one frame: receiving it costs as much as receiving one of them."""
    return msgspec.msgpack.encode([part for message in messages for part in message])


def unpack(frame: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Yield the lane and the frame of each message that was packed.

    Raises:
        msgspec.DecodeError: Nothing was.
    """
    parts = iter(_messages.decode(frame))
    return zip(parts, parts, strict=False)


def connect(context: zmq.Context[zmq.Socket[bytes]], keys: Keys, identity: bytes, events: int = 0) -> zmq.Socket[bytes]:
    """Return an encrypted connection to the controller that has said hello.

    Args:
        context: Of the process.
        keys: What admits it, and where.
        identity: Its lane.
        events: What its `get_monitor_socket()` reports, from the beginning.
    """
    socket = context.socket(zmq.DEALER, Lane)
    socket.identity = identity
    socket.ipv6 = "[" in keys.url
    socket.curve_serverkey, socket.curve_publickey, socket.curve_secretkey = (
        keys.server_key,
        keys.public_key,
        keys.secret_key,
    )
    # Queues are bounded by credits in bytes (Output) and by one request at a time, not by zmq's message counts.
    socket.sndhwm = socket.rcvhwm = 0
    socket.linger = 1000
    if events:
        socket.get_monitor_socket(events)
    socket.connect(keys.url)
    socket.send(encode(Hello(VERSION, os.getpid())))
    return socket
