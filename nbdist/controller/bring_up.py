"""How far the start of a set of ranks has come, and when it counts as stuck. Pure."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence

from nbdist.wire.life import PATIENCE_VARIABLE, Progress


class BringUp:
    """A start that is under way.

    Args:
        nodes: Where ranks are to be forked.
        patience: Seconds without any progress after which it is given up.
    """

    def __init__(self, nodes: Collection[int], patience: float) -> None:
        self._nodes = set(nodes)
        self._patience = patience
        self._moved = time.monotonic()
        self._progress: Progress | None = None  # what it does now
        self._notes: dict[int, list[str]] = {}  # by node, once its ranks are forked

    @property
    def forked(self) -> bool:
        """Whether all ranks are forked."""
        return self._notes.keys() == self._nodes

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
