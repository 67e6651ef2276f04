"""What a cell left behind, rank by rank: the value of captures, `Session.run` and background handles."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

from nbdist.base.ranks import format_ranks
from nbdist.base.text import counted, size
from nbdist.errors import RankFailure
from nbdist.wire.messages.output import STDERR, STDOUT

KEPT = 64 << 20  # bytes of a rank's printed output kept here, and as many of its displays; the log has all text


class RankResult:
    """One rank's part of a cell.

    Attributes:
        rank: The rank.
        stdout: Everything printed, exact; beyond 64 MiB the newest part, below a line that gives the missing amount.
        stderr: Likewise.
        truncated: Bytes printed to both that are no longer here. `session.logs(cell=result)` has them.
        outputs: MIME bundles of displays and of the last value, in order; beyond 64 MiB likewise the newest.
        result: The text of the last expression's value, or None.
        error: What went wrong, or None.
    """

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.result: str | None = None
        self.error: RankFailure | None = None
        self._printed: deque[tuple[int, bytes]] = deque()  # stream and bytes, as they came
        self._size = 0
        self._dropped = {STDOUT: 0, STDERR: 0}
        self._shown: deque[tuple[dict[str, Any], int]] = deque()  # bundles and their sizes
        self._shown_size = self._shown_dropped = 0

    @property
    def stdout(self) -> str:
        """What was printed to stdout so far."""
        return self._text(STDOUT)

    @property
    def stderr(self) -> str:
        """What was printed to stderr so far."""
        return self._text(STDERR)

    @property
    def outputs(self) -> list[dict[str, Any]]:
        """What was shown so far, as MIME bundles."""
        bundles = [data for data, _ in list(self._shown)]
        if self._shown_dropped:
            bundles.insert(0, {"text/plain": f"… {self._shown_dropped:,} earlier displays are not kept here …"})
        return bundles

    @property
    def truncated(self) -> int:
        """Bytes that were printed and are no longer here."""
        return sum(self._dropped.values())

    def add(self, stream: int, data: bytes) -> None:
        """Add bytes that the rank has printed."""
        self._printed.append((stream, data))
        self._size += len(data)
        while self._size > KEPT:
            of, oldest = self._printed.popleft()
            self._size -= len(oldest)
            self._dropped[of] += len(oldest)

    def show(self, data: dict[str, Any], size: int) -> None:
        """Add a bundle that the rank has shown, and its size in bytes."""
        self._shown.append((data, size))
        self._shown_size += size
        while self._shown_size > KEPT and len(self._shown) > 1:
            self._shown_size -= self._shown.popleft()[1]
            self._shown_dropped += 1

    def _text(self, stream: int) -> str:
        data = b"".join(data for of, data in list(self._printed) if of == stream)
        if not self._dropped[stream]:
            return data.decode(errors="replace")
        start = data.find(b"\n") + 1  # of the first whole line
        left_out = size(self._dropped[stream] + start)
        where = "`session.logs(cell=result)` reads it from the output log"
        note = f"… {left_out} of output above this line are not kept here; {where} …\n"
        return note + data[start:].decode(errors="replace")

    def __repr__(self) -> str:
        state = f"{self.error.name}: {self.error.text}" if self.error else f"result {self.result}"
        seen = f"{counted(len(self.stdout), 'character')}, {counted(len(self.outputs), 'output')}"
        return f"<rank {self.rank}: {seen}, {state}>"


class CellResult(Mapping[int, RankResult]):
    """A cell's results by rank: `result[0].stdout`.

    Attributes:
        serial: The cell's number in the output log.
    """

    def __init__(self, ranks: list[int], serial: int) -> None:
        self.serial = serial
        self._ranks = {rank: RankResult(rank) for rank in ranks}

    def __getitem__(self, rank: int) -> RankResult:
        try:
            return self._ranks[rank]
        except KeyError:
            raise KeyError(f"rank {rank} did not run this cell; ranks {format_ranks(self._ranks)} did") from None

    def __iter__(self) -> Iterator[int]:
        return iter(self._ranks)

    def __len__(self) -> int:
        return len(self._ranks)

    def __repr__(self) -> str:
        return "\n".join(map(repr, self._ranks.values()))
