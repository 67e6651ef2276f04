"""What cells printed, read from the controller's output log part by part, so that only one part is in memory."""

from __future__ import annotations

import time
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from nbdist.base.text import size
from nbdist.client.base.results import CellResult
from nbdist.client.output.screen import Decoders
from nbdist.errors import UsageError
from nbdist.wire.messages.output import LogPart

Ask = Callable[..., LogPart]

_SEARCH_SECONDS = 2.0
SEARCH_CHARACTERS = 1 << 20


class CellLog:
    """The log of one cell.

    Args:
        ask: Asks the controller: takes the fields of a ReadLog except its number.
        cell: The cell's number in the notebook, or its result; None for the newest that printed.

    Attributes:
        number: The cell's number; 0: it has none.
        size: Its bytes, over all ranks.

    Raises:
        UsageError: That cell printed nothing, or the log no longer has it.
    """

    def __init__(self, ask: Ask, cell: int | CellResult | None = None) -> None:
        self._ask = ask
        serials = [cell.serial] if isinstance(cell, CellResult) else []
        part = ask(serials=serials, cell=cell if isinstance(cell, int) else None, ranks=[])
        if not part.serials:
            raise UsageError(_explain_nothing(cell))
        self._serials = part.serials
        self.number = part.number
        self._name = f"cell {part.number}" if part.number else "this cell"
        self.size = part.size
        self._dropped, self._missing = part.dropped, part.missing

    def read(self, ranks: Sequence[int], position: int = 0) -> Iterator[tuple[int, str]]:
        """Yield what these ranks printed (stdout and stderr), in order: rank and text."""
        decoders = Decoders()
        for _, part in self._parts(ranks, position):
            for rank, stream, data in part.records:
                yield rank, decoders.decode(rank, stream, data)

    def lines(self, ranks: Sequence[int], tail: int | None = None) -> Iterator[str]:
        """Yield the same rank by rank, with the rank's number before each line, in pieces of any size.

        Args:
            tail: Only this many of the last lines of each rank.
        """
        starts = self._find_tails(ranks, tail) if tail is not None else {}
        for rank in ranks:
            position, skip = starts.get(rank, (0, 0))
            texts = (text for _, text in self.read([rank], position))
            yield from _with_prefix(rank, _without_first_lines(texts, skip))

    def page(self, rank: int, position: int = 0) -> tuple[str, int | None]:
        """Return the part of what this rank printed at a position, and where the next one begins; None: it is the last.

        A line that lies across two parts is cut.
        """
        decoders = Decoders()
        for _, part in self._parts([rank], position):
            if text := "".join(decoders.decode(rank, stream, data) for _, stream, data in part.records):
                return text, part.next
        return "", None

    def search(self, rank: int, words: str, position: int = 0) -> tuple[str, int | None]:
        """Return lines of this rank that contain some words, in capitals or not, and where the search goes on.

        It ends after some megabytes of lines or some seconds. A line is cut where that is within it.

        Args:
            rank: Whose lines.
            words: What they contain.
            position: Where to begin.

        Returns:
            The lines, and the position of what has not been searched; None: all has.
        """
        deadline = time.monotonic() + _SEARCH_SECONDS
        found, length, begun = [], 0, ""
        decoders = Decoders()
        for _, part in self._parts([rank], position):
            text = begun + "".join(decoders.decode(rank, stream, data) for _, stream, data in part.records)
            is_last = part.next is None or length > SEARCH_CHARACTERS or time.monotonic() > deadline
            end = len(text) if is_last else text.rfind("\n") + 1
            lines, begun = _lines_with(words.lower(), text[:end]), text[end:]
            found += lines
            length += sum(map(len, lines))
            if is_last:
                return "\n".join([*found, ""]) if found else "", part.next
        return "", None

    def explain_gaps(self) -> str:
        """Return what the log does not have of this cell, as far as it has been read; "" if nothing is missing."""
        clauses = []
        if self._dropped:
            clauses.append(f"the first {size(self._dropped)} that {self._name} printed made room for newer output")
        if self._missing:
            clauses.append(f"{size(self._missing)} more that {self._name} printed could not be written to the log")
        return "; ".join(clauses)

    def _parts(self, ranks: Sequence[int], start: int = 0) -> Iterator[tuple[int, LogPart]]:
        """Yield each part with its position."""
        position: int | None = start
        while position is not None:
            part = self._ask(serials=self._serials, ranks=list(ranks), position=position)
            self._dropped, self._missing = part.dropped, part.missing
            yield position, part
            position = part.next

    def _find_tails(self, ranks: Sequence[int], lines: int) -> dict[int, tuple[int, int]]:
        """Return where each rank's last lines begin: a position, and the number of lines to skip from there."""
        counts = {rank: _LineCount() for rank in ranks}
        for position, part in self._parts(ranks):
            for rank, _, data in part.records:
                if data:
                    counts[rank].add(position, data, lines)
        return {rank: count.start(lines) for rank, count in counts.items()}


@dataclass
class _LineCount:
    """The lines of a rank so far.

    marks: positions of parts, and the number of lines before each. open: whether the last line is incomplete.
    """

    ends: int = 0
    open: bool = False
    marks: deque[tuple[int, int]] = field(default_factory=lambda: deque([(0, 0)]))

    def add(self, position: int, data: bytes, tail: int) -> None:
        if self.marks[-1][0] != position:
            self.marks.append((position, self.ends))
        self.ends += data.count(b"\n")
        self.open = not data.endswith(b"\n")
        while len(self.marks) > 1 and self.marks[1][1] < self.ends - tail:
            self.marks.popleft()

    def start(self, tail: int) -> tuple[int, int]:
        skip = max(0, self.ends + self.open - tail)
        position, before = self.marks[0]
        return position, skip - before


def _lines_with(words: str, text: str) -> list[str]:
    if words not in text.lower():
        return []  # splitting takes longer
    return [line for line in text.split("\n") if words in line.lower()]


def _without_first_lines(texts: Iterable[str], count: int) -> Iterator[str]:
    for text in texts:
        found = text.count("\n") if count else 0
        if count and found < count:
            count -= found
        elif count:
            yield text.split("\n", count)[-1]
            count = 0
        else:
            yield text


def _with_prefix(rank: int, texts: Iterable[str]) -> Iterator[str]:
    """Yield a rank's text with its number before each line; the last line always ends with a newline."""
    prefix = f"[{rank}] "
    fresh = True  # at the start of a line
    for text in texts:
        if not text:
            continue
        ended = text.endswith("\n")
        body = text[:-1] if ended else text
        yield (prefix if fresh else "") + body.replace("\n", f"\n{prefix}") + ("\n" if ended else "")
        fresh = ended
    if not fresh:
        yield "\n"


def _explain_nothing(cell: int | CellResult | None) -> str:
    if cell is None:
        return "no cell has printed anything on ranks yet: the log is empty"
    name = f"cell {cell}" if isinstance(cell, int) else "this cell"
    return f"{name} printed nothing on ranks, or the log no longer has it; `%distributed logs` shows the newest"


def read_logs(ask: Ask, ranks: Sequence[int], cell: int | CellResult | None) -> dict[int, str]:
    """Return everything a cell printed, by rank. Warns about what the log could not keep.

    Args:
        ask: As of CellLog.
        ranks: Whose output.
        cell: As of CellLog.

    Raises:
        UsageError: That cell printed nothing, or the log no longer has it.
    """
    log = CellLog(ask, cell)
    texts: dict[int, list[str]] = {rank: [] for rank in ranks}
    for rank, text in log.read(ranks):
        texts[rank].append(text)
    if gaps := log.explain_gaps():
        warnings.warn(gaps, stacklevel=3)
    return {rank: "".join(parts) for rank, parts in texts.items()}
