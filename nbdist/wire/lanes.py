"""The connections between client, controller, agent and ranks: their names, their encryption, and their contents.

Each process dials the controller's one ROUTER socket, once per lane, so that a flood on one lane never delays
another. A connection's identity is its lane: `client.events`, `agent.control`, `rank.cell/2/3` (epoch 2, rank 3).
A message is one frame; on its way to the controller a large one goes in several frames. CurveZMQ protects every hop.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import zmq

from nbdist.wire.frames import encode
from nbdist.wire.message import VERSION, Hello

CLIENT_COMMANDS = b"client.commands"
CLIENT_EVENTS = b"client.events"
AGENT_CONTROL = b"agent.control"
AGENT_OUTPUT = b"agent.output"
RANK_CELL = "rank.cell"
RANK_CONTROL = "rank.control"
RANK_DISPLAY = "rank.display"
LANES = {*(name.decode() for name in (CLIENT_COMMANDS, CLIENT_EVENTS, AGENT_CONTROL, AGENT_OUTPUT))} | {
    RANK_CELL,
    RANK_CONTROL,
    RANK_DISPLAY,
}

# The largest frame that the controller accepts. zmq allocates a frame's whole length as soon as its header has
# arrived, from anyone: this bounds what a connection without keys can cost.
LARGEST_FRAME = 128 << 10
HANDSHAKE_LIMIT = 3.0  # seconds that it may stay without keys
_IN_PARTS = b"\xc1"  # no message starts with this byte: it announces frames that make up one message


def lane(name: str, epoch: int, rank: int) -> bytes:
    """Return the identity of a rank's connection."""
    return b"%s/%d/%d" % (name.encode(), epoch, rank)


def parse_lane(identity: bytes) -> tuple[str, int, int]:
    """Return the name, epoch and rank of a connection; epoch and rank are -1 for connections that belong to no rank."""
    name, _, rest = identity.decode().partition("/")
    if not rest:
        return name, -1, -1
    epoch, _, rank = rest.partition("/")
    return name, int(epoch), int(rank)


class Keys(msgspec.Struct, frozen=True):
    """The controller's address, and the key pair with which one kind of process may connect to it."""

    url: str
    server_key: bytes
    public_key: bytes
    secret_key: bytes


def write_key_file(path: Path, keys: Keys) -> None:
    """Write keys to a file that only its owner can read."""
    fields = {
        name: value.decode() if isinstance(value, bytes) else value
        for name, value in msgspec.structs.asdict(keys).items()
    }
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "w") as file:
        json.dump(fields, file)


def read_key_file(path: Path) -> Keys:
    """Read keys from a file that `write_key_file` wrote."""
    fields = json.loads(path.read_text())
    return Keys(fields["url"], *(fields[name].encode() for name in ("server_key", "public_key", "secret_key")))


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


def connect(context: zmq.Context[zmq.Socket[bytes]], keys: Keys, identity: bytes) -> zmq.Socket[bytes]:
    """Return an encrypted connection to the controller that has said hello."""
    socket = context.socket(zmq.DEALER, Lane)
    socket.identity = identity
    socket.curve_serverkey, socket.curve_publickey, socket.curve_secretkey = (
        keys.server_key,
        keys.public_key,
        keys.secret_key,
    )
    # Queues are bounded by credits in bytes (Output) and by one request at a time, not by zmq's message counts.
    socket.sndhwm = socket.rcvhwm = 0
    socket.linger = 1000
    socket.connect(keys.url)
    socket.send(encode(Hello(VERSION, os.getpid())))
    return socket
