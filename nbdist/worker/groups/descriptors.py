"""The descriptors of this process: which are sockets and epoll sets, and what ends a connection. Imports no torch."""

from __future__ import annotations

import contextlib
import os
import re
import resource
import socket
from collections.abc import Iterable, Iterator, Mapping, Sequence

_TARGET = re.compile(r"^tfd:\s*(\d+)", re.MULTILINE)
_CALL_LIMIT = 1.0  # seconds in which a listener of this process accepts a connection

_listeners: dict[int, tuple[int, str]] = {}  # of epoll sets: the listening socket of each, and its inode


def links() -> Iterator[tuple[int, str]]:
    """Yield all open descriptors, with what /proc says that they are."""
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # closed meanwhile
            yield int(name), os.readlink(f"/proc/self/fd/{name}")


def sockets() -> list[tuple[int, str]]:
    """Return descriptors of sockets, with their inodes."""
    return [(fd, link) for fd, link in links() if link.startswith("socket:")]


def epolls(links: Mapping[int, str]) -> dict[int, str]:
    """Return descriptors of epoll sets, with the inode of the listening socket in each ("" for none).

    Args:
        links: Of all descriptors. What many renewals have left stays open, so nothing is looked up twice.
    """
    found = {}
    for fd in [fd for fd, link in links.items() if link == "anon_inode:[eventpoll]"]:
        listener, inode = _listeners.get(fd, (-1, ""))
        if not inode or links.get(listener) != inode:
            listener, inode = _listeners[fd] = listening(fd)
        found[fd] = inode
    return found


def targets(epoll: int) -> list[int]:
    """Return the descriptors in an epoll set."""
    try:
        with open(f"/proc/self/fdinfo/{epoll}") as file:
            return [int(fd) for fd in _TARGET.findall(file.read())]
    except OSError:
        return []


def count(epoll: int) -> int:
    """Return how many descriptors an epoll set has; 0 if it is none."""
    with contextlib.suppress(OSError), open(f"/proc/self/fdinfo/{epoll}", "rb", buffering=0) as file:
        return file.read().count(b"\ntfd:")
    return 0


def listening(epoll: int) -> tuple[int, str]:
    """Return the listening socket in an epoll set, and its inode; -1 and "" if it has none."""
    for fd in targets(epoll):
        with contextlib.suppress(OSError), _socket(fd) as found:
            if found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                return fd, os.readlink(f"/proc/self/fd/{fd}")
    return -1, ""


def peer_port(fd: int) -> int:
    """Return the port that a TCP connection leads to; 0 where it is none."""
    with contextlib.suppress(OSError, IndexError, TypeError), _socket(fd) as found:
        if found.family in (socket.AF_INET, socket.AF_INET6):
            return int(found.getpeername()[1])
    return 0


def keep_from_children(descriptors: Iterable[int]) -> None:
    """Close them in programs that this process starts: else a peer would not notice the end of this process."""
    for fd in descriptors:
        with contextlib.suppress(OSError):
            os.set_inheritable(fd, False)


def shut_down(descriptors: Sequence[int]) -> None:
    """End connections."""
    for fd in descriptors:
        with contextlib.suppress(OSError), _socket(fd) as found:
            found.shutdown(socket.SHUT_RDWR)


def make_room() -> None:
    """Raise the limit of open descriptors where more than half of them are in use."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 2 * len(os.listdir("/proc/self/fd")) > soft != resource.RLIM_INFINITY:
        wanted = 2 * soft if hard == resource.RLIM_INFINITY else min(2 * soft, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def stop_reading(descriptors: Sequence[int]) -> list[int]:
    """Let this process see the end of these connections, and nobody else.

    Returns:
        Copies, which keep the connections open towards the peers. Close them when the peers may notice.
    """
    copies = []
    for fd in descriptors:
        with contextlib.suppress(OSError), _socket(fd) as found:
            if found.type == socket.SOCK_STREAM and not found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                copies.append(os.dup(fd))
                found.shutdown(socket.SHUT_RD)
    return copies


def call(listener: int, message: bytes) -> None:
    """Connect to a listening socket of this process, send a message, and hang up."""
    with contextlib.suppress(OSError), _socket(listener) as found, socket.socket(found.family) as caller:
        caller.settimeout(_CALL_LIMIT)
        caller.connect(found.getsockname())
        caller.sendall(message)


@contextlib.contextmanager
def _socket(fd: int) -> Iterator[socket.socket]:
    """Yield a descriptor as a socket, for a moment. Raises OSError if it isn't one."""
    copy = os.dup(fd)
    try:
        found = socket.socket(fileno=copy)
    except OSError:
        os.close(copy)
        raise
    with found:
        yield found
