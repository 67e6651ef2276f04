"""`%%distributed --profile`: one trace of all ranks, and the table shown with it."""

from __future__ import annotations

import statistics
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import msgspec

from nbdist.base.text import duration, percent, size, table
from nbdist.client.ranks.task_record import TaskRecord
from nbdist.errors import UsageError
from nbdist.metrics.profile import Operation, Summary, merge

_SHOWN = 8  # operations
_WAITED_FOR = 0.2  # share of the time that others spend longer in communication
_ENDINGS = (".json", ".json.gz")


class CellProfile:
    """The profile of one cell.

    Args:
        path: The file for the trace; empty for a name with the cell's number, in the current folder.
        number: The cell's number.

    Raises:
        UsageError: The file can't be written there.

    Attributes:
        folder: The folder for the ranks' parts.
    """

    def __init__(self, path: str, number: int) -> None:
        self._target = Path(path or f"profile-cell{number}.json.gz").expanduser()
        if not self._target.name.endswith(_ENDINGS):
            raise UsageError(f"--profile {path}: the name of a trace must end in {' or '.join(_ENDINGS)}")
        parent = self._target.resolve().parent
        if not parent.is_dir():
            raise UsageError(f"--profile {path}: there is no folder {parent}; create it, or choose another folder")
        self._folder = tempfile.TemporaryDirectory(prefix="nbdist-profile-")
        self.folder = self._folder.name

    def conclude(self, task: TaskRecord) -> str:
        """Write the trace of the ranks that have ended, and summarize it.

        Returns:
            A table, and the path of the trace.
        """
        with self._folder:
            summaries = [
                msgspec.msgpack.decode(reply.payload, type=Summary)
                for _, reply in sorted(task.replies.items())
                if reply.payload
            ]
            if not summaries:
                return "nbdist: no rank finished, so there is no profile"
            written = merge(summaries, self._target) if any(summary.trace for summary in summaries) else 0
        lines = [render(summaries)]
        if written:
            lines.append(f"trace of all ranks: {self._target} ({size(written)}); open it in https://ui.perfetto.dev")
        return "\n".join(lines)


def render(summaries: Sequence[Summary]) -> str:
    """Return the conclusion, the ranks and their shares, then the operations that took the most time."""
    rows = [
        (one.rank, duration(one.seconds), *map(percent, (one.busy, one.communication, one.idle)))
        for one in summaries
        if not one.why
    ]
    parts = [conclusion] if (conclusion := _conclusion(summaries)) else []
    parts += [table(rows, ("rank", "wall", "computing", "communication", "idle"))] if rows else []
    if operations := _over_ranks(summaries):
        parts.append(table(operations, ("operation", "calls", "own time, median rank", "slowest rank")))
    parts += [f"rank {one.rank}: {one.why}" for one in summaries if one.why]
    return "\n\n".join(parts)


def _conclusion(summaries: Sequence[Summary]) -> str:
    """Return which rank the others wait for: all take part in the same collectives, so it spends least time in them."""
    shares = {one.rank: one.communication for one in summaries if not one.why}
    if len(shares) < 2:
        return ""
    least = min(shares, key=lambda rank: shares[rank])
    others = statistics.median(share for rank, share in shares.items() if rank != least)
    if others - shares[least] < _WAITED_FOR:
        return ""
    it, they = percent(shares[least]), percent(others)
    who = "the others spend" if len(shares) > 2 else "the other spends"
    return f"rank {least} is waited for: {who} {they} in communication, it {it}"


def _over_ranks(summaries: Sequence[Summary]) -> list[tuple[str, int, str, str]]:
    by_name: defaultdict[str, list[tuple[int, Operation]]] = defaultdict(list)
    for summary in summaries:
        for operation in summary.operations:
            by_name[operation.name].append((summary.rank, operation))
    found = sorted(by_name.items(), key=lambda item: -max(operation.own for _, operation in item[1]))[:_SHOWN]
    rows = []
    for name, ranks in found:
        slowest, longest = max(ranks, key=lambda item: item[1].own)
        median = statistics.median(operation.own for _, operation in ranks)
        calls = max(operation.calls for _, operation in ranks)
        rows.append((name[:60], calls, duration(median), f"{duration(longest.own)} @{slowest}"))
    return rows
