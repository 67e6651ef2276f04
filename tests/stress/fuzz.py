"""Lies for the listening sockets of a session: bytes from somebody without keys, messages from somebody with them.

`python -m tests.stress.fuzz 10000` tells 10,000 of each to a session of its own.
"""

from __future__ import annotations

import contextlib
import gc
import random
import socket
import struct
import sys
from typing import Any

import msgspec
import zmq

import nbdist
from nbdist import Session
from nbdist.client.session.session import rank_set_of
from nbdist.wire.base.keys import Keys, read_key_file
from nbdist.wire.frames import AnyMessage
from nbdist.wire.messages.cells import Execute, Interrupt
from nbdist.wire.messages.handover import Attach, Leave
from nbdist.wire.messages.healing import Heal, Shrink
from nbdist.wire.messages.life import Shutdown, Start, Stop, Stopped
from nbdist.wire.messages.output import Credit, Output, WidgetMessage
from nbdist.wire.messages.rank_processes import Exited, Gone, Spawn, SpawnFailed, Spawning
from nbdist.wire.questions.questions import Ask
from nbdist.worker.lanes.display_lane import DisplayLane

GREETING = b"\xff\0\0\0\0\0\0\0\x01\x7f\x03\x01CURVE" + b"\0" * 47
_HELLO = b"\x05HELLO\x01\0" + b"\0" * 72

# What a holder of keys may do to their own session, and so no lie: end it, start another, end what runs, leave it.
_HONEST = {
    Start,
    Stop,
    Interrupt,
    Spawn,
    Spawning,
    SpawnFailed,
    Exited,
    Gone,
    Attach,
    Leave,
}
_KINDS = AnyMessage.__args__
_PYTHON: dict[type, type] = {
    msgspec.inspect.IntType: int,
    msgspec.inspect.FloatType: float,
    msgspec.inspect.BoolType: bool,
    msgspec.inspect.StrType: str,
    msgspec.inspect.BytesType: bytes,
    msgspec.inspect.ListType: list,
    msgspec.inspect.DictType: dict,
}
_VALUES: list[Any] = [
    *(None, True, False, 0, 1, -1, 2, 99, -(1 << 31), 1 << 31, 1 << 40, -(1 << 62), 1 << 63, 0.0, -1.0, 1e300),
    *(float("nan"), float("inf"), "", "x", "stack", "launch", "ok", "\x00" * 40, "../../etc", b"", b"\xff" * 64),
    *([], [0], [0, 1], [-1, 99], [1 << 60], ["0"], [[[]]], {}, {"a": 1}, {"serial": -1}, {1: 2}),
]


def bytes_of_a_stranger(rng: random.Random) -> bytes:
    """Something to say at a port, without keys."""
    noise = rng.randbytes(rng.choice([0, 1, 8, 64, 200, 4096]))
    length = struct.pack(">Q", rng.choice([0, 1, 200, 1 << 16, 1 << 20, 1 << 30, 1 << 62, (1 << 64) - 1]))
    said = rng.choice(
        [
            noise,
            GREETING[: rng.randrange(len(GREETING))],
            GREETING + noise,
            GREETING + bytes([rng.randrange(256)]) + length + noise,
            GREETING + b"\x04\xc8" + _HELLO + noise,
            GREETING + b"\x04" + bytes([rng.randrange(256)]) + noise,
            b"\xff" + length + noise,
        ]
    )
    damaged = bytearray(said)
    for _ in range(rng.choice([0, 0, 1, 5])):
        if damaged:
            damaged[rng.randrange(len(damaged))] = rng.randrange(256)
    return bytes(damaged)


def tell_as_a_stranger(rng: random.Random, port: int) -> None:
    """Connect, say something, and leave: in good order, or not."""
    with socket.create_connection(("127.0.0.1", port), timeout=5) as stranger:
        if rng.random() < 0.5:
            stranger.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        stranger.settimeout(0.02)
        with contextlib.suppress(OSError):
            stranger.sendall(bytes_of_a_stranger(rng))
            if rng.random() < 0.1:
                stranger.recv(4096)


def lie(rng: random.Random, identity: bytes) -> bytes:
    """A message of any type whose fields hold anything. None runs code, or ends ranks that are there."""
    kind = rng.choice(_KINDS)
    if kind is Shutdown and identity.startswith(b"client"):
        kind = Stopped
    tag = kind.__name__ if rng.random() < 0.95 else rng.choice(["Explode", 7])
    fields = [_value(rng, field.type) for field in msgspec.structs.fields(kind)]
    nobody = rng.choice([[], [-1], [99, 1 << 40], 5])
    if kind in (Execute, Ask):
        fields[1] = nobody  # ranks
    if kind in (Heal, Shrink):  # either may end living ranks, if it names them
        fields[0] = nobody
    if kind in (Output, Credit, WidgetMessage) and not identity.startswith(b"rank"):
        fields[0] = rng.choice([-1, 99, 1 << 40, "0"])  # rank
    if rng.random() < 0.2:
        fields = fields[: rng.randrange(len(fields) + 1)]
    if kind in _HONEST:  # of an incarnation that never was, or out of bounds
        fields[:1] = [1 << 40]
    return msgspec.msgpack.encode([tag, *fields])


def _value(rng: random.Random, kind: Any) -> Any:
    """What a field might hold: most often something of its type."""
    if rng.random() < 0.1:
        return rng.choice(_VALUES)
    known = msgspec.inspect.type_info(kind)
    if isinstance(known, msgspec.inspect.UnionType):
        known = rng.choice(known.types)
    if isinstance(known, msgspec.inspect.LiteralType):
        return rng.choice(known.values)
    if isinstance(known, (msgspec.inspect.StructType)):
        values = [_value(rng, field.type) for field in msgspec.structs.fields(known.cls)]
        values = [known.tag, *values] if known.tag is not None else values
        return values if known.array_like else dict(zip(known.cls.__struct_fields__, values, strict=True))
    wanted = _PYTHON.get(type(known), object)
    return rng.choice([value for value in _VALUES if isinstance(value, wanted)])


def lanes(rng: random.Random) -> bytes:
    """An identity: one of the session's own, or one that never was."""
    own = [b"client.commands/0", b"agent.control", b"agent.output"]
    ranks = [
        b"rank.%s/%d/%d" % (name, incarnation, rank)
        for name in (b"cell", b"control", b"display", b"x")
        for incarnation in (0, 1, 2, 99)
        for rank in (0, 1, 7)
    ]
    strange = [b"intruder", b"rank.cell/x/y", b"rank.cell/-1/-1", b"\xff\xfe", b"client", b"agent.control/1/2"]
    return rng.choice(own + ranks + strange)


def tell_as_a_friend(rng: random.Random, context: zmq.Context[zmq.Socket[bytes]], keys: Keys, count: int) -> None:
    """Connect with keys under some name, and lie `count` times."""
    with context.socket(zmq.DEALER) as friend:
        friend.identity, friend.linger = lanes(rng), 2000
        friend.curve_serverkey, friend.curve_publickey, friend.curve_secretkey = (
            keys.server_key,
            keys.public_key,
            keys.secret_key,
        )
        friend.connect(keys.url)
        for _ in range(count):
            friend.send_multipart([lie(rng, friend.identity) for _ in range(rng.choice([1, 1, 1, 3]))])


def tell_as_a_rank(seed: int, count: int) -> None:
    """On a rank: lie over its own connection."""
    rng = random.Random(seed)
    lane = next(each for each in gc.get_objects() if isinstance(each, DisplayLane))
    for _ in range(count):
        lane._socket.send(lie(rng, b"rank"))


def tell(seed: int, session: Session, count: int) -> None:
    """Tell `count` lies of each kind, the same for the same seed."""
    rng = random.Random(seed)
    connection = rank_set_of(session)._connection
    keys = read_key_file(connection.key_file)
    port = int(keys.url.rpartition(":")[2])
    for _ in range(count):
        tell_as_a_stranger(rng, port)
    with zmq.Context() as context:
        for _ in range(0, count, 20):
            tell_as_a_friend(rng, context, keys, min(count, 20))
    commands = connection._commands
    assert commands is not None
    for _ in range(count):
        commands.send(lie(rng, b"client"))
    session.call(tell_as_a_rank, seed, count, ranks=0)


def main() -> None:
    count = int(sys.argv[1])
    with nbdist.Session(2) as session:
        session.push({"kept": list(range(1000))})
        tell(count, session, count)
        assert session.run("print(len(kept))")[1].stdout == "1000\n"
        print(f"{count} lies of each kind; the session works")


if __name__ == "__main__":
    main()
