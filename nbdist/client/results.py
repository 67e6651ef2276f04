"""What a cell left behind, rank by rank: the values that captures, `Session.run` and background handles give."""

from __future__ import annotations

import codecs
from collections.abc import Iterator, Mapping
from typing import Any

from nbdist.errors import RankFailure
from nbdist.protocol import STDOUT
from nbdist.ranks import format_ranks


class RankResult:
    """One rank's part of a cell.

    Attributes:
        rank: The rank.
        stdout: All that was printed, exact.
        stderr: Likewise.
        outputs: MIME bundles of displays and of the last value, in order.
        result: The text of the last expression's value, or None.
        error: What went wrong, or None.
    """

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.outputs: list[dict[str, Any]] = []
        self.result: str | None = None
        self.error: RankFailure | None = None
        self._printed: dict[int, list[bytes]] = {}

    @property
    def stdout(self) -> str:
        """All that was printed to stdout so far."""
        return self._text(1)

    @property
    def stderr(self) -> str:
        """All that was printed to stderr so far."""
        return self._text(2)

    def add(self, stream: int, data: bytes) -> None:
        """Add bytes that the rank has printed."""
        self._printed.setdefault(stream, []).append(data)

    def _text(self, stream: int) -> str:
        chunks = self._printed.get(stream, [])
        if len(chunks) > 1:
            chunks[:] = [b"".join(chunks)]
        return chunks[0].decode(errors="replace") if chunks else ""

    def __repr__(self) -> str:
        state = f"{self.error.name}: {self.error.text}" if self.error else f"result {self.result}"
        return f"<rank {self.rank}: {len(self.stdout):,} characters, {len(self.outputs)} outputs, {state}>"


class CellResult(Mapping[int, RankResult]):
    """A cell's results by rank: `result[0].stdout`."""

    def __init__(self, ranks: list[int]) -> None:
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


class Decoders:
    """Turns each rank's bytes into text, however they are cut."""

    def __init__(self) -> None:
        self._decoders: dict[tuple[int, int], codecs.IncrementalDecoder] = {}

    def decode(self, rank: int, stream: int, data: bytes, final: bool = False) -> str:
        """The text in these bytes, as far as its characters are complete."""
        decoder = self._decoders.get((rank, stream))
        if decoder is None:
            if not data:
                return ""
            decoder = self._decoders[rank, stream] = codecs.getincrementaldecoder("utf-8")("replace")
        return decoder.decode(data, final)

    @staticmethod
    def name(stream: int) -> str:
        """The name of a descriptor."""
        return "stdout" if stream == STDOUT else "stderr"
