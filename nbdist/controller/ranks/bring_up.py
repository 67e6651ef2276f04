"""The start of a set of ranks: what is forked where, how far that has come, and when it counts as stuck."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

from nbdist.wire.base.message import Message
from nbdist.wire.messages.life import PATIENCE_VARIABLE, Progress, StartOptions
from nbdist.wire.messages.rank_processes import Spawn, StoreAddress


class BringUp:
    """A start that is under way.

    Args:
        incarnation: The number of the set of ranks.
        shares: By node, what is to be started there.
        address: Where the store is to listen.
        interface: The network between the nodes; "": the one that leads to the store.
        send: Sends to the agent of a node.
    """

    def __init__(
        self,
        incarnation: int,
        shares: Mapping[int, StartOptions],
        address: str,
        interface: str,
        send: Callable[[int, Message], None],
    ) -> None:
        self._incarnation = incarnation
        self._shares = dict(shares)
        self._store = StoreAddress(address)
        self._interface = interface
        self._send = send
        self._patience = shares[0].patience  # seconds without any progress after which it is given up
        self._moved = time.monotonic()
        self._progress: Progress | None = None  # what it does now
        self._notes: dict[int, list[str]] = {}  # by node, once its ranks are forked

    def begin(self) -> None:
        """Have the store opened and the ranks of this machine forked."""
        self._spawn(0)

    def go_on(self, store: StoreAddress) -> None:
        """Have the ranks of the other nodes forked, as the store is open."""
        self._store = store
        for node in self._shares:
            if node:
                self._spawn(node)

    def _spawn(self, node: int) -> None:
        self._send(node, Spawn(self._incarnation, self._shares[node], self._store, self._interface))

    def take_in(self, node: int, share: StartOptions) -> None:
        """Have a node prepare what newcomers are forked from: one that has come since the start."""
        self._send(node, Spawn(self._incarnation, share, self._store, self._interface, later=True))

    @property
    def forked(self) -> bool:
        """Whether all ranks are forked."""
        return self._notes.keys() == self._shares.keys()

    @property
    def notes(self) -> list[str]:
        """Lines for the user, node by node."""
        return [note for node in sorted(self._notes) for note in self._notes[node]]

    @property
    def due(self) -> float:
        """When it counts as stuck."""
        return self._moved + self._patience

    def move(self, progress: Progress | None = None) -> bool:
        """Note progress. `progress`: what it does now. Returns whether that is new."""
        self._moved = time.monotonic()
        before, self._progress = self._progress, progress or self._progress
        return self._progress != before

    def note_forked(self, node: int, notes: Sequence[str]) -> None:
        """Note that the ranks of a node are forked."""
        self._notes[node] = list(notes)

    def describe_stuck(self, missing: str) -> str:
        """Describe a start that has made no progress. `missing`: the ranks that are not ready, in words."""
        doing = self._progress.text if self._progress is not None else ""
        where = f"{missing} not ready" if self.forked else doing
        return (
            f"the start made no progress for {self._patience:g} s ({where or 'no process came up'}). "
            f"Type `%distributed start` to try again; what has been imported is kept. Set {PATIENCE_VARIABLE} in "
            "the environment to wait longer."
        )
