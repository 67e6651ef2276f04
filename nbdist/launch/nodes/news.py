"""What the nodes of a launch write in their common store for each other: failures, settings, signs of life.

Independent of how they meet or what they run.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Iterable
from typing import Any

import msgspec
from torch.distributed import Store

from nbdist.errors import RankFailure
from nbdist.launch.launch_errors import LaunchFailure

_TRACEBACK_LIMIT = 100_000  # characters sent to other nodes
NOWHERE = -1  # the node of a failure that no node has reported
_BEAT = 1.0  # seconds between signs of life of a node
_SILENT = 10.0  # seconds without one until this is reported


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


class Pulse:
    """Notices when a node is no longer heard from, for example when its network fails: then nothing ends; ranks wait.

    Args:
        store: The store for signs of life.
        node: This node's number.
        watched: The nodes to watch.
    """

    def __init__(self, store: Store, node: int, watched: Iterable[int]) -> None:
        self._store, self._node, self._due = store, node, 0.0
        self._heard = {other: (0, time.monotonic()) for other in watched if other != node}  # number of signs, and when
        self._silent: set[int] = set()

    def beat(self) -> list[str]:
        """Send a sign of life, if it is time for one.

        Returns:
            A line for each watched node that has fallen silent since the last call, or is heard from again.
        """
        now = time.monotonic()
        if now < self._due:
            return []
        self._due = now + _BEAT
        self._store.add(f"pulse/{self._node}", 1)
        return [line for other in self._heard if (line := self._look(other, now))]

    def _look(self, node: int, now: float) -> str:
        count, since = self._heard[node]
        if (found := self._store.add(f"pulse/{node}", 0)) != count:
            self._heard[node] = found, now
            if node not in self._silent:
                return ""
            self._silent.remove(node)
            return f"node {node} is heard from again"
        if node in self._silent or now < since + _SILENT:
            return ""
        self._silent.add(node)
        return (
            f"node {node} has not been heard from for {now - since:.0f} s, so its ranks can't be reached either: "
            "check its machine and network. Ctrl-C ends the launch here"
        )
