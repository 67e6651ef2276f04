"""The controller's one socket: which lanes may connect, which are connected, and messages waiting for the others.

Owns the socket, its keys and the key file, and knows which lanes lead over another node. Independent of what the
messages mean.
"""

from __future__ import annotations

import contextlib
import secrets
import shutil
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import msgspec
import zmq

from nbdist.wire.base.keys import Home, Keys, write_key_file
from nbdist.wire.base.message import Message
from nbdist.wire.frames import encode
from nbdist.wire.lanes import (
    CLIENT_LANES,
    GUEST,
    NODE_LANES,
    RANK_LANES,
    RELAY_LANES,
    TOGETHER,
    VISITOR,
    parse_lane,
    send_parts,
    unpack,
)
from nbdist.wire.listener import Listener

_NETWORK_THREADS = 4  # encrypt what goes to other nodes; each connection belongs to one of them
_NOTEBOOK = "notebook"
_RANKS = tuple(f"{name}/".encode() for name in RANK_LANES)
_RELAYS = tuple(f"{name}/".encode() for name in RELAY_LANES)


class MessageRouter:
    """Listens on loopback for those who have keys, and where it is told to for other nodes.

    Args:
        runtime_folder: Where the notebook's key file is written.
        kernel: The notebook's process.

    Attributes:
        socket: The socket to poll before `received`.
        key_file: For the notebook.
        node_keys: For the agent of this machine and its ranks.

    Raises:
        OSError: Neither that folder nor a temporary one is writable.
    """

    def __init__(self, runtime_folder: Path, kernel: int = 0) -> None:
        self.key_file = runtime_folder / f"nbdist-{secrets.token_hex(8)}.json"
        self._home = Home.here(kernel)
        self._key_folder: Path | None = None  # our own, where Jupyter's isn't writable
        self._connected: set[bytes] = set()
        self._waiting: dict[bytes, list[bytes]] = {}  # for a lane that has not connected yet
        self._relays: dict[bytes, bytes] = {}  # by lane of a rank elsewhere, the lane of its node
        self._guests: dict[bytes, bytes] = {}  # by lane, their public keys
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(_NETWORK_THREADS)
        self._listener = Listener(self._context)
        self.socket = self._listener.socket
        url = self._listener.listen()
        self.node_keys = self._listener.admit(_node(0), url)
        try:
            self._write(self._listener.admit(_NOTEBOOK, url))
        except Exception:  # whatever it was, no file is left
            self.remove_files()
            raise

    # --- other nodes

    def open_to(self, address: str, port: int) -> str:
        """Listen for other nodes, too.

        Returns:
            Where.

        Raises:
            zmq.ZMQError: It can't.
        """
        return self._listener.listen(address, port)

    def close_to_others(self, url: str) -> None:
        """Stop listening there."""
        self._listener.stop_listening(url)

    def invite(self, url: str) -> Keys:
        """Make keys for one guest."""
        return self._listener.admit(GUEST, url)

    def welcome(self, guest: bytes, node: int, url: str) -> Keys:
        """Make keys for a node, to replace those of the guest that it was (public key `guest`)."""
        self._listener.expel(guest)
        return self._listener.admit(_node(node), url)

    def key_of(self, guest: bytes) -> bytes:
        """Return the public key of a guest."""
        return self._guests[guest]

    def dismiss(self, public_key: bytes) -> None:
        """Admit no new connections with these keys."""
        self._listener.expel(public_key)

    def lose(self, node: int) -> None:
        """Drop the lanes of a node that is gone, and of its ranks. Its keys open nothing any more."""
        self._listener.expel_holder(_node(node))
        parsed = {lane: parse_lane(lane) for lane in self._connected}
        gone = {lane for lane, of in parsed.items() if of.name in NODE_LANES and of.number == node}
        gone |= {lane for lane, relay in self._relays.items() if relay in gone}
        self._connected -= gone
        for lane in gone:
            self._relays.pop(lane, None)

    @property
    def files(self) -> list[Path]:
        """The files it has written."""
        return [path for path in (self.key_file, self._key_folder) if path is not None]

    def _write(self, keys: Keys) -> None:
        try:
            self.key_file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            write_key_file(self.key_file, keys, self._home)
        except OSError:  # the home folder is read-only or full: our own notebook finds the file elsewhere too
            self._key_folder = Path(tempfile.mkdtemp(prefix="nbdist-keys-"))
            self.key_file = self._key_folder / self.key_file.name
            write_key_file(self.key_file, keys, self._home)

    def received(self, limit: int) -> Iterator[tuple[bytes, list[bytes]]]:
        """Yield messages that have arrived, at most `limit`, each with its lane."""
        for identity, parts, key in self._listener.received(limit, self._connected):
            if key is not None and not self._may_be(identity, holder := self._listener.holder(key)):
                continue
            if key is not None and holder in (GUEST, ""):
                self._guests[identity] = key
            if not identity.startswith(_RELAYS) or len(parts) == 1:
                yield identity, parts
                continue
            lane, *frames = parts
            if lane != TOGETHER:
                yield from self._relayed(identity, lane, frames)
                continue
            with contextlib.suppress(msgspec.DecodeError):  # a node that lies
                for lane, frame in unpack(frames[0]):
                    yield from self._relayed(identity, lane, [frame])

    def _relayed(self, relay: bytes, lane: bytes, frames: list[bytes]) -> Iterator[tuple[bytes, list[bytes]]]:
        """Yield what a node has passed on, if it is from one of its own ranks."""
        if not lane.startswith(_RANKS):
            return
        if lane not in self._connected:
            self._relays[lane] = relay
        if self._relays.get(lane) == relay:  # else it speaks for a rank that has come another way
            yield lane, frames

    def _may_be(self, identity: bytes, holder: str) -> bool:
        """Return whether the holder of a key may use a lane. Ranks have the keys of this machine's agent."""
        try:
            name, _, number, _ = parse_lane(identity)
        except ValueError:
            return False
        if name in CLIENT_LANES or name == VISITOR:
            return holder == _NOTEBOOK
        if name in NODE_LANES:
            return holder == _node(number)
        if name in RANK_LANES:
            return holder == _node(0)
        return holder in (GUEST, "")  # keys that were used meanwhile open nothing, but why deserves an answer

    def connect(self, lane: bytes) -> None:
        """Mark a lane as connected, and send what was waiting for it."""
        self._connected.add(lane)
        for frame in self._waiting.pop(lane, []):
            send_parts(self.socket, *self._way_to(lane), frame)

    def disconnect(self, lane: bytes) -> None:
        """Mark a lane as gone; messages to it wait from now on."""
        self._connected.discard(lane)

    def drop(self, lanes: Iterable[bytes]) -> None:
        """Forget lanes of a process that has ended."""
        for lane in lanes:
            self._connected.discard(lane)
            self._relays.pop(lane, None)
            self._waiting.pop(lane, None)

    def forget(self, prefix: bytes) -> None:
        """Forget all lanes whose names begin with `prefix`: they are gone for good."""
        self._connected = {lane for lane in self._connected if not lane.startswith(prefix)}
        self._relays = {lane: relay for lane, relay in self._relays.items() if not lane.startswith(prefix)}
        self._waiting = {lane: frames for lane, frames in self._waiting.items() if not lane.startswith(prefix)}

    def is_connected(self, lane: bytes) -> bool:
        return lane in self._connected

    def send(self, lane: bytes, message: Message) -> None:
        """Send a message, as soon as the lane is connected."""
        self.forward(lane, encode(message))

    def forward(self, lane: bytes, frame: bytes) -> None:
        """Send a message that is already encoded, like `send`."""
        if lane in self._connected:
            send_parts(self.socket, *self._way_to(lane), frame)
        else:
            self._waiting.setdefault(lane, []).append(frame)

    def reach(self, lane: bytes, message: Message) -> bool:
        """Send a message, as `send` does. Return False if who had connected by this lane has no connection any more."""
        if lane not in self._connected:
            self.send(lane, message)
            return True
        self.socket.router_mandatory = True  # else what nobody can get is dropped without a word
        try:
            self.send(lane, message)
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            return False
        finally:
            self.socket.router_mandatory = False
        return True

    def forward_to_all(self, lanes: Iterable[bytes], frame: bytes) -> None:
        """Send the same message by several lanes, once per node that they lead through."""
        together: defaultdict[bytes, list[bytes]] = defaultdict(list)
        for lane in lanes:
            if (relay := self._relays.get(lane)) is not None and lane in self._connected:
                together[relay].append(lane)
            else:
                self.forward(lane, frame)
        for relay, there in together.items():
            send_parts(self.socket, relay, b" ".join(there), frame)

    def relay_of(self, lane: bytes) -> int:
        """Return the node that a lane leads through; 0 for this one."""
        relay = self._relays.get(lane)
        return parse_lane(relay).number if relay is not None else 0

    def _way_to(self, lane: bytes) -> list[bytes]:
        relay = self._relays.get(lane)
        return [lane] if relay is None else [relay, lane]

    def send_together(self, lane: bytes, frames: Sequence[bytes]) -> None:
        """Send encoded messages as one to a lane that is connected."""
        send_parts(self.socket, lane, *frames)

    def remove_files(self) -> None:
        """Remove the files it has written."""
        self.key_file.unlink(missing_ok=True)
        if self._key_folder is not None:
            shutil.rmtree(self._key_folder, ignore_errors=True)

    def close(self) -> None:
        """Send what is under way, and listen no more."""
        self._listener.close()
        self._context.term()


def _node(number: int) -> str:
    return f"node {number}"
