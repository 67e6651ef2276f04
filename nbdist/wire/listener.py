"""A socket that listens for those who have keys, and knows who they are.

Independent of messages: the controller listens for all, an agent for the ranks of its own node.
"""

from __future__ import annotations

from collections.abc import Iterator

import zmq
from zmq.auth.thread import ThreadAuthenticator

from nbdist.wire.base.keys import Keys
from nbdist.wire.lanes import HANDSHAKE_LIMIT, LARGEST_FRAME

_ENVELOPE = 1 << 10  # bytes that encryption adds to a frame, and more
_LINGER = 500  # milliseconds


class Listener:
    """A ROUTER socket that admits those whose keys it has been given.

    Args:
        context: Of the process.

    Attributes:
        socket: To be polled for what `received` gives.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        self._holders: dict[bytes, str] = {}  # who has which public key
        self._public, secret = zmq.curve_keypair()
        self._authenticator = ThreadAuthenticator(context)
        self._authenticator.start()
        self._authenticator.configure_curve_callback("*", self)
        self.socket = context.socket(zmq.ROUTER)
        self.socket.curve_server = True
        self.socket.curve_publickey, self.socket.curve_secretkey = self._public, secret
        self.socket.sndhwm = self.socket.rcvhwm = 0
        self.socket.linger = _LINGER
        self.socket.maxmsgsize = LARGEST_FRAME + _ENVELOPE
        self.socket.handshake_ivl = int(HANDSHAKE_LIMIT * 1000)

    def listen(self, address: str = "127.0.0.1", port: int = 0) -> str:
        """Listen at an address of this machine, at a port that is free unless one is named.

        Returns:
            Where, for those who connect.

        Raises:
            zmq.ZMQError: It can't.
        """
        six = ":" in address
        self.socket.ipv6 = six
        self.socket.bind(f"tcp://{f'[{address}]' if six else address}:{port or '*'}")
        return str(self.socket.getsockopt_string(zmq.LAST_ENDPOINT))

    def stop_listening(self, url: str) -> None:
        """Let nobody connect there any more; who is connected stays so."""
        self.socket.unbind(url)

    def admit(self, who: str, url: str) -> Keys:
        """Make a key pair, and admit who has it."""
        public, secret = zmq.curve_keypair()
        self._holders[public] = who
        return Keys(url, self._public, public, secret)

    def expel(self, public_key: bytes) -> None:
        """Admit nobody with this key any more; who is connected stays so."""
        self._holders.pop(public_key, None)

    def expel_holder(self, who: str) -> None:
        """Admit nobody any more with any key that this holder was given; who is connected stays so."""
        self._holders = {key: holder for key, holder in self._holders.items() if holder != who}

    def holder(self, public_key: bytes) -> str:
        """Return who was given this key; "" if it admits nobody any more."""
        return self._holders.get(public_key, "")

    def callback(self, domain: str, key: bytes) -> bool:
        """Admit a key. Called by the authenticator's thread."""
        return key in self._holders

    def received(self, limit: int, known: set[bytes]) -> Iterator[tuple[bytes, list[bytes], bytes | None]]:
        """Yield the messages that have arrived.

        Args:
            limit: Of messages.
            known: Identities whose keys nobody asks for.

        Returns:
            Of each message the identity, the frames, and whose public key it came with (None for those that are known).
        """
        for _ in range(limit):
            try:
                identity = self.socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            if identity in known:
                yield identity, self._rest(), None
                continue
            first = self.socket.recv(copy=False)
            key = str(first.get("User-Id")).encode()
            yield identity, [first.bytes, *(self._rest() if first.more else ())], key

    def _rest(self) -> list[bytes]:
        frames = [self.socket.recv()]
        while self.socket.get(zmq.RCVMORE):  # the attribute of that name takes four times as long
            frames.append(self.socket.recv())
        return frames

    def close(self) -> None:
        """Send what is under way, and listen no more."""
        self.socket.close(linger=_LINGER)
        self._authenticator.stop()
