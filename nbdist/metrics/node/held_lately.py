"""What torch held in each process when the driver was asked: the two are read up to a period apart.

Memory that a process takes or gives back in between would count as held outside of torch, or by other processes.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from nbdist.metrics.node.sample import RankSample

_MOST = 10  # readings of a rank


class HeldLately:
    """Remembers what ranks said since the driver's last answer, and just before."""

    def __init__(self) -> None:
        self._readings: dict[tuple[int, int], list[tuple[float, int]]] = {}

    def note(self, ranks: Sequence[RankSample], looked: Sequence[float | None], now: float) -> list[RankSample]:
        """Note what torch holds in ranks now, and return them with what it held about when the driver was asked.

        Args:
            ranks: As they are now.
            looked: For each, when the driver's answer came, in seconds by any one clock; None: there is none.
            now: By that clock.
        """
        before, self._readings = self._readings, {}
        found = []
        for rank, at in zip(ranks, looked, strict=True):
            if rank.reserved is None:
                found.append(rank)
                continue
            key = rank.rank, rank.pid
            readings = [*before.get(key, []), (now, rank.reserved)]
            older = sum(when < at for when, _ in readings) if at is not None else 0
            self._readings[key] = readings[max(0, older - 1) :][-_MOST:]
            found.append(msgspec.structs.replace(rank, held=[held for _, held in self._readings[key]]))
        return found
