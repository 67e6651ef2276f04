"""Find out, from outside torch, what listens at an address, and which of this process's sockets lead to a store."""

from __future__ import annotations

import contextlib
import functools
import os
import socket
import stat
import struct
from collections.abc import Iterator

from torch.distributed import TCPStore

CONNECT_LIMIT = 1.0  # seconds
_VALIDATE, _MAGIC, _PING = 0, 0x3C85F7CE, 13  # the start of what a TCPStore client sends to it


def own_connections() -> Iterator[socket.socket]:
    """Yield a copy of each of this process's sockets, to be closed. Linux only."""
    for entry in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if stat.S_ISSOCK(os.stat(f"/proc/self/fd/{entry}").st_mode):
                yield socket.socket(fileno=os.dup(int(entry)))


def peer(connection: socket.socket) -> tuple[str, int]:
    """Return the address at the other end."""
    host, port = connection.getpeername()[:2]
    return host.removeprefix("::ffff:"), port  # torch uses IPv6 sockets also for IPv4


def is_store(connection: socket.socket) -> bool:
    """Return whether a TCPStore is at the other end. Torch's client would wait forever for one that says nothing."""
    nonce = 0x6E62
    connection.settimeout(CONNECT_LIMIT)
    with contextlib.suppress(OSError):
        connection.sendall(struct.pack("=BIBI", _VALIDATE, _MAGIC, _PING, nonce))
        return connection.recv(4) == struct.pack("=I", nonce)
    return False


@functools.cache
def can_tell_stores() -> bool:
    """Return whether this torch's stores speak as `is_store` expects."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with socket.create_connection(("127.0.0.1", store.port), timeout=CONNECT_LIMIT) as connection:
        return is_store(connection)
