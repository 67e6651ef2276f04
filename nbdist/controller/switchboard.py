"""The controller's one socket: which lanes may connect, which are connected, and messages waiting for the others.

Owns the socket, its keys and the key file. Independent of what the messages mean.
"""

from __future__ import annotations

import secrets
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import zmq
from zmq.auth.thread import ThreadAuthenticator

from nbdist.wire.frames import encode
from nbdist.wire.lanes import HANDSHAKE_LIMIT, LARGEST_FRAME, Keys, write_key_file
from nbdist.wire.message import Message

_ENVELOPE = 1 << 10  # at least what encryption adds to a frame, in bytes
_LINGER = 500  # milliseconds


class Switchboard:
    """Listens on loopback for processes that have keys.

    Args:
        runtime_folder: Where the notebook's key file is written.

    Attributes:
        socket: The socket to poll before `received`.
        key_file: For the notebook.
        node_keys: For the agent and its ranks.

    Raises:
        OSError: Neither that folder nor a temporary one is writable.
    """

    def __init__(self, runtime_folder: Path) -> None:
        self.key_file = runtime_folder / f"nbdist-{secrets.token_hex(8)}.json"
        self._key_folder: Path | None = None  # our own, where Jupyter's isn't writable
        self._connected: set[bytes] = set()
        self._waiting: dict[bytes, list[bytes]] = {}  # for lanes that have not connected yet
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        public, secret = zmq.curve_keypair()
        client, node = zmq.curve_keypair(), zmq.curve_keypair()
        self._authenticator = ThreadAuthenticator(self._context)
        self._authenticator.start()
        self._authenticator.configure_curve_callback("*", _Whitelist({client[0], node[0]}))
        self.socket = self._context.socket(zmq.ROUTER)
        self.socket.curve_server = True
        self.socket.curve_publickey, self.socket.curve_secretkey = public, secret
        self.socket.sndhwm = self.socket.rcvhwm = 0
        self.socket.linger = _LINGER
        self.socket.maxmsgsize = LARGEST_FRAME + _ENVELOPE
        self.socket.handshake_ivl = int(HANDSHAKE_LIMIT * 1000)
        port = self.socket.bind_to_random_port("tcp://127.0.0.1")
        url = f"tcp://127.0.0.1:{port}"
        self.node_keys = Keys(url, public, *node)
        try:
            self._write(Keys(url, public, *client))
        except Exception:
            self.remove_files()
            raise

    @property
    def files(self) -> list[Path]:
        """The files it has written."""
        return [path for path in (self.key_file, self._key_folder) if path is not None]

    def _write(self, keys: Keys) -> None:
        try:
            self.key_file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            write_key_file(self.key_file, keys)
        except OSError:  # the home folder is read-only or full: our own notebook finds the file elsewhere too
            self._key_folder = Path(tempfile.mkdtemp(prefix="nbdist-keys-"))
            self.key_file = self._key_folder / self.key_file.name
            write_key_file(self.key_file, keys)

    def received(self, limit: int) -> Iterator[tuple[bytes, list[bytes]]]:
        """Yield up to `limit` messages that have arrived, each with its lane."""
        for _ in range(limit):
            try:
                lane, *frames = self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            yield lane, frames

    def connect(self, lane: bytes) -> None:
        """Mark a lane as connected, and send what was waiting for it."""
        self._connected.add(lane)
        for frame in self._waiting.pop(lane, []):
            self.socket.send_multipart([lane, frame])

    def disconnect(self, lane: bytes) -> None:
        """Mark a lane as gone; messages to it wait from now on."""
        self._connected.discard(lane)

    def forget(self, prefix: bytes) -> None:
        """Forget all lanes whose names begin with `prefix`: they are gone for good."""
        self._connected = {lane for lane in self._connected if not lane.startswith(prefix)}
        self._waiting = {lane: frames for lane, frames in self._waiting.items() if not lane.startswith(prefix)}

    def is_connected(self, lane: bytes) -> bool:
        return lane in self._connected

    def send(self, lane: bytes, message: Message) -> None:
        """Send a message, as soon as the lane is connected."""
        self.forward(lane, encode(message))

    def forward(self, lane: bytes, frame: bytes) -> None:
        """Send a message that is already encoded, like `send`."""
        if lane in self._connected:
            self.socket.send_multipart([lane, frame])
        else:
            self._waiting.setdefault(lane, []).append(frame)

    def send_together(self, lane: bytes, frames: Sequence[bytes]) -> None:
        """Send encoded messages as one to a lane that is connected."""
        self.socket.send_multipart([lane, *frames])

    def remove_files(self) -> None:
        """Remove the files it has written."""
        self.key_file.unlink(missing_ok=True)
        if self._key_folder is not None:
            shutil.rmtree(self._key_folder, ignore_errors=True)

    def close(self) -> None:
        """Send what is pending, and stop listening."""
        self.socket.close(linger=_LINGER)
        self._authenticator.stop()
        self._context.term()


class _Whitelist:
    """Admits exactly these public keys."""

    def __init__(self, keys: set[bytes]) -> None:
        self._keys = keys

    def callback(self, domain: str, key: bytes) -> bool:
        return key in self._keys
