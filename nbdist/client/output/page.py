"""What merged output becomes: the texts and rich items for the notebook, and the state of the cell's last line.

Owns how a line is labeled with its ranks, and how a progress line makes way for others. What is written when is up to
the merger.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, TypeAlias

from nbdist.ranks import ONE_NODE, RankNames

Stream = Literal["stdout", "stderr"]

OwnBars: TypeAlias = Mapping[str, Mapping[int, str]]  # by a line that shows bars: what that of each rank shows

_MOST_STATES = 20_000  # that are kept of a page's bars
_REDRAW = 0.1  # seconds between redraws of the progress line
_REDRAW_BELOW = 1.0  # the same if each redraw leaves a line behind: bars on stdout and stderr in turn


@dataclass(frozen=True, slots=True)
class Text:
    """Text to write to a stream of the notebook unchanged."""

    stream: Stream
    text: str


@dataclass(frozen=True, slots=True)
class Shown:
    """A rich item (display, clear_output, ...) that these ranks made."""

    ranks: tuple[int, ...]
    item: Any


@dataclass(slots=True)
class Line:
    """The cell's last line while it is open: a text of some ranks or, without ranks, a progress line."""

    stream: Stream
    ranks: tuple[int, ...]
    width: int
    rewritten: bool = False


class Page:
    """What was written and not taken yet, and the state of the last line.

    Attributes:
        open: The last line while the cursor is in it.
        drawn: Progress lines followed only by other progress lines, by stream.
        bars: Each rank's own bars, by the lines that stand for them on the page now; "": shown again further below.
        prefix: Returns the label of a line from its ranks.

    Args:
        names: How to name ranks.
    """

    def __init__(self, names: RankNames = ONE_NODE) -> None:
        self.prefix = lru_cache(maxsize=1024)(names.label)
        self.open: Line | None = None
        self.drawn: dict[Stream, str] = {}
        self.bars: dict[str, Mapping[int, str]] = {}
        self._new_bars: list[str] = []
        # Progress lines that have other output below, until there is a newer one.
        self._left: defaultdict[Stream, list[str]] = defaultdict(list)
        self._above: set[str] = set()  # those of which there is one
        self._taken: list[Text | Shown] = []
        self._pieces: list[str] = []
        self._stream: Stream = "stdout"

    def take(self) -> list[Text | Shown]:
        """Return what has been written since the last call."""
        self._join()
        taken, self._taken = self._taken, []
        return taken

    def take_bars(self) -> list[str]:
        """Return the lines that have come to `bars` since the last call."""
        taken, self._new_bars = self._new_bars, []
        return taken

    def write_lines(self, stream: Stream, ranks: tuple[int, ...], lines: list[str]) -> None:
        """Write whole lines of these ranks."""
        self._make_way(stream)
        start = self.prefix(ranks)
        self._write(stream, start + ("\n" + start).join(lines) + "\n")

    def show(self, ranks: tuple[int, ...], item: Any) -> None:
        """Show a rich item."""
        self._make_way(None)
        self._join()
        self._taken.append(Shown(ranks, item))

    def open_line(self, stream: Stream, ranks: tuple[int, ...], text: str) -> None:
        """Begin a line of these ranks, and leave the cursor in it."""
        self._make_way(stream)
        self.open = Line(stream, ranks, 0)
        self.continue_line(self.prefix(ranks) + text)

    def continue_line(self, text: str) -> None:
        """Continue the open line."""
        if self.open:
            self._write(self.open.stream, text)
            self.open.width += len(text)

    def end_line(self) -> None:
        """Move the cursor to the start of a line; a progress line is wiped."""
        self._make_way(self.open.stream if self.open else None)

    def give_up_line(self) -> None:
        """Make way for output over the open line: within it if it is one rank's, else below it."""
        if self.open and len(self.open.ranks) == 1:
            self.open.ranks = ()
        else:
            self.end_line()

    def end_bar(self, stream: Stream, text: str, states: Mapping[int, str]) -> None:
        """Write the last line of a bar that these ranks have ended."""
        ranks = tuple(sorted(states))
        self.write_lines(stream, ranks, [text])
        self._drop_left(stream)
        self._note_bars(self.prefix(ranks) + text, states)

    def draw(self, stream: Stream, line: str, states: Mapping[int, str]) -> None:
        """Show a progress line in place of the open one, or on a new line.

        Args:
            stream: Where.
            line: The line.
            states: What the bar of each of its ranks shows.
        """
        width = 0
        if self.open and self.open.stream == stream and not self.open.ranks:
            width = self.open.width
            self._remove_bars(self.drawn.get(stream, ""))
        elif self.open:
            self._write(self.open.stream, "\n")
            self._left[stream] += [self.drawn[stream]] if stream in self.drawn else []
        self._drop_left(stream)
        self._write(stream, "\r" + line.ljust(width))
        self.open = Line(stream, (), len(line))
        self.drawn[stream] = line
        self._note_bars(line, states)

    def wipe(self, stream: Stream) -> None:
        """Remove the progress line of a stream if it is the open line."""
        if self.open and self.open.stream == stream and not self.open.ranks:
            self.end_line()

    def pause(self, stream: Stream) -> float:
        """Return the seconds between redraws of a progress line."""
        in_the_way = self.open and not self.open.ranks and self.open.stream != stream
        return _REDRAW_BELOW if in_the_way else _REDRAW

    def _make_way(self, stream: Stream | None) -> None:
        """Move the cursor to the start of a line, to write to a stream or to show an item (None)."""
        drawn, self.drawn = self.drawn, {}
        line, self.open = self.open, None
        if line is None:
            return
        if line.stream == stream and not line.ranks:
            self._remove_bars(drawn.pop(stream, ""))
            self._write(stream, "\r" + " " * line.width + "\r")  # the bar will be redrawn below
        else:
            self._write(line.stream, "\n")
        for each, text in drawn.items():
            self._left[each].append(text)

    def _drop_left(self, stream: Stream) -> None:
        """Note that bars of the progress lines that were left are shown again below them."""
        for line in self._left.pop(stream, ()):
            if line in self.bars:
                self._above.add(line)
                self._remove_bars(line)

    def _remove_bars(self, line: str) -> None:
        """Note that a line is no longer there, or only where its bars are shown again below."""
        states = self.bars.pop(line, {})
        if line in self._above:
            self._note_bars(line, dict.fromkeys(states, ""))

    def _note_bars(self, line: str, states: Mapping[int, str]) -> None:
        if not states:
            return
        self.bars[line] = states
        self._new_bars.append(line)
        while len(self.bars) * len(states) > max(_MOST_STATES, len(states)):
            oldest = next(iter(self.bars))
            del self.bars[oldest]
            self._above.discard(oldest)

    def _write(self, stream: Stream, text: str) -> None:
        if stream != self._stream:
            self._join()
            self._stream = stream
        self._pieces.append(text)

    def _join(self) -> None:
        if self._pieces:
            self._taken.append(Text(self._stream, "".join(self._pieces)))
            self._pieces = []
