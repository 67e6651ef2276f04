"""What merged output becomes: the texts and rich items for the notebook, and the state of the cell's last line.

Owns how a line is labeled with its ranks, and how a progress line makes way for others. What is written when is up to
the merger.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, TypeAlias

from nbdist.base.ranks import ONE_NODE, RankNames

Stream = Literal["stdout", "stderr"]

OwnBars: TypeAlias = Mapping[str, Mapping[int, str]]  # by a line that shows bars: what that of each rank shows

_MOST_STATES = 20_000  # that are kept of a page's bars


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
        drawn: The progress line, while it is there.
        bars: Each rank's own bars, by the lines that stand for them on the page now.
        prefix: Returns the label of a line from its ranks.

    Args:
        names: How to name ranks.
    """

    def __init__(self, names: RankNames = ONE_NODE) -> None:
        self.prefix = lru_cache(maxsize=1024)(names.label)
        self.open: Line | None = None
        self.drawn = ""
        self.bars: dict[str, Mapping[int, str]] = {}
        self._new_bars: list[str] = []
        self._taken: list[Text | Shown] = []
        self._pieces: list[str] = []
        self._stream: Stream | None = None  # the last one that was written to

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
        self.end_line()
        start = self.prefix(ranks)
        self._write(stream, start + ("\n" + start).join(lines) + "\n")

    def show(self, ranks: tuple[int, ...], item: Any) -> None:
        """Show a rich item."""
        self.end_line()
        self._join()
        self._taken.append(Shown(ranks, item))

    def open_line(self, stream: Stream, ranks: tuple[int, ...], text: str) -> None:
        """Begin a line of these ranks, and leave the cursor in it."""
        self.end_line()
        self.open = Line(stream, ranks, 0)
        self.continue_line(self.prefix(ranks) + text)

    def continue_line(self, text: str) -> None:
        """Continue the open line."""
        if self.open:
            self._write(self.open.stream, text)
            self.open.width += len(text)

    def end_line(self) -> None:
        """Move the cursor to the start of a line; a progress line is wiped."""
        line, self.open = self.open, None
        if line is None:
            return
        if line.ranks:
            self._write(line.stream, "\n")
            return
        self._remove_bars()  # what still runs is drawn again below
        # A notebook deletes what is before a backspace, so that no blanks are left; what does not, shows blanks.
        blank = " " * line.width
        self._write(line.stream, f"\r{blank}\r{blank}" + "\b" * line.width)

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
        self._note_bars(self.prefix(ranks) + text, states)

    def draw(self, stream: Stream, line: str, states: Mapping[int, str]) -> None:
        """Show a progress line in place of the open one, or on a new line.

        It is drawn on the stream that was written to last, whatever its own is: on another one it would begin an output
        below, where nothing takes it away once more text has come.

        Args:
            stream: Where, if nothing has been written yet.
            line: The line.
            states: What the bar of each of its ranks shows.
        """
        where, width = self._stream or stream, 0
        if self.open and not self.open.ranks:
            where, width = self.open.stream, self.open.width
            self._remove_bars()
        elif self.open:
            self._write(self.open.stream, "\n")
        self._write(where, "\r" + line.ljust(width))
        self.open = Line(where, (), max(width, len(line)))
        self.drawn = line
        self._note_bars(line, states)

    def wipe(self) -> None:
        """Remove the progress line if there is one."""
        if self.open and not self.open.ranks:
            self.end_line()

    def _remove_bars(self) -> None:
        """Note that the progress line is no longer there."""
        self.bars.pop(self.drawn, None)
        self.drawn = ""

    def _note_bars(self, line: str, states: Mapping[int, str]) -> None:
        if not states:
            return
        self.bars[line] = states
        self._new_bars.append(line)
        while len(self.bars) * len(states) > max(_MOST_STATES, len(states)):
            del self.bars[next(iter(self.bars))]

    def _write(self, stream: Stream, text: str) -> None:
        if stream != self._stream:
            self._join()
            self._stream = stream
        self._pieces.append(text)

    def _join(self) -> None:
        if self._stream and self._pieces:
            self._taken.append(Text(self._stream, "".join(self._pieces)))
            self._pieces = []
