"""What the nodes of a launch write in their common store for each other."""

from __future__ import annotations

import socket
import time
from typing import Any

import msgspec

from nbdist.errors import RankFailure
from nbdist.launch.launch_errors import LaunchFailure

_TRACEBACK_LIMIT = 100_000  # characters sent to other nodes
NOWHERE = -1  # the node of a failure that no node has reported


class News(msgspec.Struct, frozen=True):
    """A failure that ends the ranks of all nodes. `final`: they don't restart, even if restarts are left."""

    node: int
    host: str
    failure: dict[str, Any]
    final: bool

    @classmethod
    def of(cls, failure: RankFailure, node: int, *, final: bool) -> News:
        """Return a failure of this node."""
        fields = {name: getattr(failure, name) for name in ("rank", "kind", "name", "text", "exit_code", "lost_peer")}
        fields["local_rank"] = getattr(failure, "local_rank", 0)  # no rank reported it: the first rank
        fields["traceback"] = failure.traceback[-_TRACEBACK_LIMIT:]
        # Neither `when`, which is on this machine's clock, nor `pickled`: don't unpickle data from a network.
        return cls(node, socket.gethostname(), fields, final)

    def as_failure(self) -> LaunchFailure:
        """Return the failure, as if it had just happened here."""
        return LaunchFailure(**self.failure, when=time.monotonic())


class Facts(msgspec.Struct, frozen=True):
    """What all nodes have to agree on."""

    num_nodes: int
    rdzv_id: str
    rdzv_backend: str
    max_restarts: int
