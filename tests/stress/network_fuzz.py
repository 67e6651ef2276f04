"""Lies from the network's side: of strangers, of guests, and of a node that has joined.

`python -m tests.stress.network_fuzz 10000` tells that many of each to a session of its own, from a seed. One node is
honest; afterwards it and the notebook's machine must have kept what they had.
"""

from __future__ import annotations

import base64
import contextlib
import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence

import msgspec
import zmq

from nbdist import Session
from nbdist.wire.base.keys import Keys
from nbdist.wire.base.message import VERSION, Hello, Message
from nbdist.wire.frames import decode, encode
from nbdist.wire.lanes import (
    AGENT_CONTROL,
    AGENT_OUTPUT,
    AGENT_TRANSFERS,
    GUEST,
    RANK_LANES,
    RELAY_CONTROL,
    RELAY_OUTPUT,
    TOGETHER,
    connect,
    lane,
    node_lane,
    pack,
)
from nbdist.wire.messages.life import Shutdown
from nbdist.wire.messages.rank_processes import (
    Exited,
    Gone,
    Kill,
    Ready,
    Spawn,
    Spawned,
    SpawnFailed,
    Spawning,
    StoreAddress,
    StoreOpened,
)
from nbdist.wire.processes.nodes import Join, Ping, Pong, Token, Versions, Welcome
from tests.stress.fuzz import lie, tell_as_a_stranger

_EPOCH = 1
_LIES_AT_ONCE = 500  # until the session is asked whether it still works
_NODE_LANES = (AGENT_CONTROL, AGENT_OUTPUT, AGENT_TRANSFERS, RELAY_CONTROL, RELAY_OUTPUT)
_PRIVATE = [
    b"client.commands/0",
    b"client.events/0",
    b"guest/1",
    b"visitor/1",
    b"agent.control/1",
    b"relay.control/1",
    b"x",
]

NAMED: dict[str, tuple[str, list[bytes | Message]]] = {
    "in the notebook's name": (RELAY_CONTROL, [b"client.commands/0", Shutdown()]),
    "in the name of somebody with the key file": (RELAY_CONTROL, [b"visitor/1", Shutdown()]),
    "for a rank of another machine": (RELAY_CONTROL, [b"rank.cell/1/0", Ready(0, "cpu", "none", "a lie")]),
    "in the notebook's name, among others": (
        RELAY_CONTROL,
        [TOGETHER, pack([(b"client.commands/0", encode(Shutdown()))])],
    ),
    "that a start has failed": (AGENT_CONTROL, [SpawnFailed(1, "a lie")]),
    "where the store is": (AGENT_CONTROL, [StoreOpened(1, StoreAddress("127.0.0.1", 9))]),
    "that a rank of another machine has died": (AGENT_OUTPUT, [Exited(1, 0, 1, -9, "", 0.0)]),
    "with a text that is none": (RELAY_CONTROL, [b"rank.display/1/2", b"\x93\xa7Displ\xcdy\x01\x02"]),
}


class LyingNode:
    """A node with one rank, which serves its session so far that it starts, and then says anything."""

    def __init__(self, address: str, token: str) -> None:
        parsed = Token.parse(token)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        keys = Keys(f"tcp://{address}", parsed.server_key, zmq.curve_public(parsed.secret_key), parsed.secret_key)
        guest = connect(self._context, keys, f"{GUEST}/7".encode())
        guest.send(encode(Join(VERSION, "liar", Versions.here(), 0)))
        welcome = decode(guest.recv())
        assert isinstance(welcome, Welcome), welcome
        guest.close(linger=0)
        self._sockets = {
            name: connect(self._context, welcome.keys, node_lane(name, welcome.node)) for name in _NODE_LANES
        }
        self._lock = threading.Lock()  # sockets are not for two threads at once
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="liar")
        self._thread.start()

    def close(self) -> None:
        self._stop.set()
        self._thread.join()
        self._context.destroy(linger=0)

    def _serve(self) -> None:
        control = self._sockets[AGENT_CONTROL]
        while not self._stop.is_set():
            with self._lock:
                for name, socket in self._sockets.items():
                    while socket.poll(0):
                        frames = socket.recv_multipart()
                        if name == AGENT_CONTROL:
                            self._heed(decode(frames[0]), control)
            time.sleep(0.002)  # leaves the sockets to those who lie

    def _heed(self, message: object, control: zmq.Socket[bytes]) -> None:
        if isinstance(message, Spawn):
            for rank in message.options.ranks:
                control.send(encode(Spawned(message.incarnation, rank, os.getpid())))
                for name in sorted(RANK_LANES):
                    self._relay(lane(name, message.incarnation, rank), encode(Hello(VERSION, 0)))
                self._relay(lane("rank.cell", message.incarnation, rank), encode(Ready(rank, "cpu", "none")))
            control.send(encode(Spawning(message.incarnation, [])))
        elif isinstance(message, Ping):
            control.send(encode(Pong(message.sent, time.monotonic())))
        elif isinstance(message, Kill):
            self._sockets[AGENT_OUTPUT].send(encode(Gone(message.incarnation)))
        elif isinstance(message, Shutdown):
            self._stop.set()

    def _relay(self, name: bytes, frame: bytes) -> None:
        self._sockets[RELAY_CONTROL].send_multipart([name, frame])

    def lie(self, rng: random.Random, ranks: Sequence[int]) -> None:
        """Say something on one of its lanes: of its own, of others, or in others' names."""
        name = rng.choice(_NODE_LANES)
        frame = self._lie(rng, ranks)
        frames = [frame]
        if name in (RELAY_CONTROL, RELAY_OUTPUT):
            rank = lane(rng.choice(sorted(RANK_LANES)), rng.choice([_EPOCH, _EPOCH, 2, 99]), rng.choice(ranks))
            frames = [rng.choice([rank, rank, rank, *_PRIVATE, rng.randbytes(9)]), frame]
            if rng.random() < 0.2:
                frames = [TOGETHER, rng.choice([pack([(frames[0], frame)] * 3), frame, rng.randbytes(40)])]
        self.say(name, frames)

    def say(self, name: str, frames: Sequence[bytes]) -> None:
        """Send something on one of its lanes."""
        with self._lock:
            self._sockets[name].send_multipart(frames)

    def _lie(self, rng: random.Random, ranks: Sequence[int]) -> bytes:
        """A message of any type; often one that names a rank of others, of the present incarnation."""
        if rng.random() < 0.05:
            return rng.randbytes(rng.randrange(200))
        frame = lie(rng, b"agent")
        fields = msgspec.msgpack.decode(frame)
        if fields[0] == "NodeLeft":  # by that it ends itself, and with it the lies
            return encode(Shutdown())
        for number, value in enumerate(fields):
            if number and type(value) is int and rng.random() < 0.6:
                fields[number] = rng.choice([_EPOCH, *ranks, -1, 1 << 40])
        return msgspec.msgpack.encode(fields)


def tell_as_a_guest(rng: random.Random, address: str, token: str) -> None:
    """Try a token that is not valid, or say something else than to join."""
    good = Token.parse(token)
    keys = [good.server_key, good.secret_key, *zmq.curve_keypair()]
    text = str(Token(good.server_key, rng.choice(keys[1:]))) if rng.random() < 0.7 else _damaged(rng, token)
    with contextlib.suppress(ValueError):
        parsed = Token.parse(text)
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        secret = parsed.secret_key
        with contextlib.suppress(zmq.ZMQError):
            pair = Keys(f"tcp://{address}", parsed.server_key, zmq.curve_public(secret), secret)
            name = rng.choice([f"{GUEST}/{rng.randrange(99)}".encode(), *_PRIVATE, lane("rank.cell", _EPOCH, 0)])
            guest = connect(context, pair, name)
            guest.send(lie(rng, b"agent"), zmq.NOBLOCK)
            guest.poll(2)
        context.destroy(linger=0)


def _damaged(rng: random.Random, token: str) -> str:
    raw = bytearray(base64.urlsafe_b64decode(token + "=="))
    for _ in range(rng.choice([1, 2, 30])):
        raw[rng.randrange(len(raw))] = rng.randrange(256)
    return base64.urlsafe_b64encode(bytes(raw[: rng.choice([len(raw), 3, 63])])).decode()


@contextlib.contextmanager
def session_with_a_liar() -> Iterator[tuple[Session, LyingNode, str, str]]:
    """A session of three ranks: on this machine, on an honest node, and on one that lies; with a used token."""
    lines: list[tuple[str, str]] = []
    ends = contextlib.ExitStack()
    liars: list[LyingNode] = []

    def progress(line: object) -> None:
        for text in str(line).splitlines():
            if "NBDIST_TOKEN=" in text:
                lines.append((text.split("NBDIST_TOKEN=")[1].split()[0], text.split()[-1]))
        if len(lines) == 2 and not liars:
            honest = subprocess.Popen(
                [sys.executable, "-m", "nbdist", "join", lines[0][1]],
                env={**os.environ, "NBDIST_TOKEN": lines[0][0]},
                stdout=subprocess.DEVNULL,
            )
            ends.callback(honest.wait, 30)
            ends.callback(honest.terminate)
            liars.append(LyingNode(lines[1][1], lines[1][0]))
            ends.callback(liars[0].close)

    with ends, Session(1, num_nodes=3, master_addr="127.0.0.1", init=False, progress=progress) as session:
        yield session, liars[0], lines[1][1], lines[1][0]


def check(session: Session) -> None:
    """Fail unless the honest ranks work and have what they had."""
    liar = next(info.rank for info in session.ranks if info.host.startswith("liar"))
    honest = [info.rank for info in session.ranks if info.rank != liar]
    result = session.run("print(kept[rank])", ranks=honest, timeout=30)
    assert [result[rank].stdout for rank in honest] == [f"{rank + 10}\n" for rank in honest], result


def tell(seed: int, count: int) -> None:
    """Tell `count` lies of each kind, the same for the same seed."""
    rng = random.Random(seed)
    with session_with_a_liar() as (session, liar, address, token):
        ranks = [info.rank for info in session.ranks]
        honest = [info.rank for info in session.ranks if not info.host.startswith("liar")]
        session.push({"kept": {rank: rank + 10 for rank in ranks}}, ranks=honest)
        port = int(address.rpartition(":")[2])
        for number in range(count):
            tell_as_a_stranger(rng, port)
            liar.lie(rng, ranks)
            if number % 10 == 0:
                tell_as_a_guest(rng, address, token)
            if number % _LIES_AT_ONCE == 0:
                check(session)
        check(session)


def tell_named() -> None:
    """Tell each of `NAMED`, and name the one that has changed something for others."""
    with session_with_a_liar() as (session, liar, _, _):
        ranks = [info.rank for info in session.ranks]
        honest = [info.rank for info in session.ranks if not info.host.startswith("liar")]
        session.push({"kept": {rank: rank + 10 for rank in ranks}}, ranks=honest)
        for name, (way, frames) in NAMED.items():
            liar.say(way, [frame if isinstance(frame, bytes) else encode(frame) for frame in frames])
            try:
                check(session)
            except Exception as error:
                raise AssertionError(f"it was believed {name}") from error
    print("none was believed")


def main() -> None:
    if sys.argv[1] == "named":
        tell_named()
        return
    count = int(sys.argv[1])
    seed = int(sys.argv[2]) if len(sys.argv) > 2 else 1
    began = time.monotonic()
    tell(seed, count)
    took = time.monotonic() - began
    print(f"{count} lies of strangers and of a node, {count // 10} of guests, in {took:.0f} s; the session works")


if __name__ == "__main__":
    main()
