"""Collectives that this rank has started and that have not ended, by torch's own record of them: its flight recorder.

Only the counters of each group are read, which torch keeps up to date by itself: what it has of single collectives asks
CUDA. Probes what it uses; where torch keeps no record, nothing is known. Knows nothing of cells or other ranks.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping

Unfinished = Mapping[str, tuple[int, int]]

_DUMPS = ("_dump_nccl_trace_json", "_dump_fr_trace_json")  # of NCCL, of gloo and others


class Record:
    """What torch has recorded of this process."""

    def __init__(self) -> None:
        self._given_up: Unfinished = {}

    def unfinished(self) -> Unfinished | None:
        """Return collectives that were started and have not ended. From any thread.

        Returns:
            For each backend that has some, the number of its last that was started, and of its last that has ended;
            None: torch keeps no record.
        """
        found = {f"{dump} {backend}": counts for dump, text in _dumps() for backend, counts in parse(text).items()}
        if not found:
            return None
        return {
            name: (started, ended)
            for name, (started, ended) in found.items()
            if started > ended and self._given_up.get(name) != (started, ended)
        }

    def give_up(self) -> None:
        """Abort the groups of what has not ended by now, and never will."""
        self._given_up = {**self._given_up, **(self.unfinished() or {})}


def parse(dump: str | bytes) -> dict[str, tuple[int, int]]:
    """Return the last collective started, and the last ended, of each backend in one of torch's dumps."""
    return {
        backend: (int(status["last_enqueued_collective"]), int(status["last_completed_collective"]))
        for backend, status in json.loads(dump).get("pg_status", {}).items()
    }


def _dumps() -> Iterator[tuple[str, str | bytes]]:
    """Yield what torch has recorded, by the name of the function that gives it."""
    c10d = sys.modules.get("torch._C._distributed_c10d")
    for name in _DUMPS:
        dump = getattr(c10d, name, None)
        if dump is not None:
            yield name, dump(False)  # without the single collectives
