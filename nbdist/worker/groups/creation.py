"""A process group that is being made: which epoll sets of gloo's are its own, and how a rank waiting in it is freed."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass, field

from nbdist.worker.groups import descriptors


@dataclass
class Creation:
    """A group that is being made.

    Attributes:
        size: How many ranks it has.
        before: Epoll sets that there were when it began, with the inodes of their listeners.
        called: Inodes of the listeners that have had a caller for each peer.
    """

    size: int
    before: dict[int, str]
    called: set[str] = field(default_factory=set)

    def new_epolls(self, links: Mapping[int, str]) -> dict[int, str]:
        """Return epoll sets that have appeared since it began, with the inodes of their listeners."""
        return {fd: inode for fd, inode in descriptors.epolls(links).items() if self.before.get(fd) != inode}

    def call_as_peers(self, listener: int, inode: str) -> None:
        """Connect to a gloo listener as each of its peers would, and hang up: a peer that was freed first never comes.

        The side that listens waits for its peer without a socket of its own that could be shut down. A peer says which
        pair it belongs to by a number below the size of the group (gloo/transport/tcp/listener.cc).
        """
        if not inode or inode in self.called:
            return
        self.called.add(inode)
        for pair in range(self.size):
            descriptors.call(listener, struct.pack("=q", pair))
