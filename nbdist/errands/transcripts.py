"""What cells have printed, as a notebook shows it, page by page: read from the output log, as far as somebody asks.

A transcript only grows, so that a position in it stays valid while the cell runs.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Callable, Sequence

from nbdist.base.ranks import RankNames
from nbdist.base.text import size
from nbdist.client.output.merge import Merger
from nbdist.client.output.page import Stream, Text
from nbdist.client.output.screen import Decoders
from nbdist.wire.messages.errands import TextPage
from nbdist.wire.messages.output import STDERR, STDOUT, LogPart

PAGE = 8_000  # characters
_KEPT = 4_000_000  # characters of a transcript
_OPEN = 8  # transcripts that are kept
_CODES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\x08")
_STREAMS: dict[int, Stream] = {STDOUT: "stdout", STDERR: "stderr"}
_WINDOW = 0.05  # seconds that a line would wait for the same one of other ranks

ReadPart = Callable[..., LogPart]


def page_of(text: str, since: int = 0) -> TextPage:
    """Return the page of a text that begins at a position; negative: its last page."""
    start = max(0, len(text) - PAGE) if since < 0 else min(since, len(text))
    shown = text[start : start + PAGE]
    return TextPage(shown, start + len(shown), len(text) - start - len(shown))


def plain(text: str) -> str:
    """Return a text without colors, and with what a bar would overwrite on lines of its own."""
    return re.sub(r"[ \t]*\r\n?[ \t]*\r*", "\n", _CODES.sub("", text))


def without_middle(text: str, most: int = PAGE) -> str:
    """Return a text that fits into a page: what is in the middle of a long one is left out."""
    if len(text) <= most:
        return text
    half = most // 2
    return f"{text[:half]}\n… {len(text) - 2 * half:,} characters left out …\n{text[-half:]}"


class Transcript:
    """What some ranks have printed in a cell.

    Args:
        read: Asks the log, as `Traffic.read_log`.
        cell: The cell's number.
        ranks: Whose output. Equal lines of several are there once, marked with their ranks where not all have them.
        names: How to name ranks.
    """

    def __init__(self, read: ReadPart, cell: int, ranks: Sequence[int], names: RankNames) -> None:
        self._read = read
        self._cell = cell
        self._ranks = list(ranks)
        self._merger = Merger(ranks, names=names, window=_WINDOW)
        self._decoders = Decoders()
        self._serials: list[int] = []
        self._position = 0
        self._clock = 0.0
        self._text = ""
        self._begin = 0  # characters before it that are not kept any more
        self._taken = 0  # bytes
        self._size = 0
        self._complete = False  # nothing more comes
        self._gaps = ""

    def page(self, since: int, *, over: bool) -> tuple[TextPage, str]:
        """Return a page, and what there is to say of it.

        Args:
            since: Where it begins; negative: the last one.
            over: Whether the cell has ended, so that nothing more comes.
        """
        wanted = None if since < 0 else since + PAGE
        while wanted is None or self._end < wanted:
            if not self._take_part(over=over):
                break
        start = max(self._begin, self._end - PAGE if since < 0 else min(since, self._end))
        first = start - self._begin
        shown = self._text[first : first + PAGE]
        left = self._end - start - len(shown)
        unread = max(0, self._size - self._taken) if wanted is not None else 0  # in bytes
        missing = f"{start - since:,} characters before this page are not kept here; " if 0 <= since < start else ""
        return TextPage(shown, start + len(shown), left + unread), missing + self._gaps

    @property
    def _end(self) -> int:
        return self._begin + len(self._text)

    def _take_part(self, *, over: bool) -> bool:
        """Read a part of the log. Returns whether there may be more."""
        if self._complete:
            return False
        part = self._read(serials=self._serials, cell=self._cell, ranks=self._ranks, position=self._position)
        if part.serials:
            self._serials, self._position, self._size = part.serials, part.end, part.size + part.dropped
            for rank, stream, data in part.records:
                self._taken += len(data)
                self._merger.feed(rank, _STREAMS[stream], self._decoders.decode(rank, stream, data), self._clock)
            self._gaps = _gaps(part)
        more = bool(part.serials) and part.next is not None
        self._complete = over and not more
        if self._complete:
            for rank in self._ranks:
                self._merger.finish(rank, self._clock)
        if not more:  # what has come is shown now, as nobody may ask again for a while; else it may have its like there
            self._clock += 2 * _WINDOW
        texts = self._merger.flush(self._clock) if self._complete else self._merger.poll(self._clock)
        self._text += plain("".join(each.text for each in texts if isinstance(each, Text)))
        if (excess := len(self._text) - _KEPT) > 0:
            self._text, self._begin = self._text[excess:], self._begin + excess
        return more


def _gaps(part: LogPart) -> str:
    gone = [f"the first {size(part.dropped)} have made room for newer output"] if part.dropped else []
    gone += [f"{size(part.missing)} could not be written to the log"] if part.missing else []
    return "; ".join(gone)


class Transcripts:
    """The transcripts that are being read.

    Args:
        read: Asks the log, as `Traffic.read_log`.
    """

    def __init__(self, read: ReadPart) -> None:
        self._read = read
        self._open: OrderedDict[tuple[int, tuple[int, ...]], Transcript] = OrderedDict()

    def of(self, cell: int, ranks: Sequence[int], names: RankNames) -> Transcript:
        """Return the transcript of a cell, of these ranks."""
        key = (cell, tuple(ranks))
        if key not in self._open:
            self._open[key] = Transcript(self._read, cell, ranks, names)
        self._open.move_to_end(key)
        while len(self._open) > _OPEN:
            self._open.popitem(last=False)
        return self._open[key]
