"""What merged output becomes: the texts and rich items for the notebook, and the state of the cell's last line.

Owns how a line is labeled with its ranks, and how a progress line makes way for others. What is written when is up to
the merger.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

from nbdist.ranks import ONE_NODE, RankNames

Stream = Literal["stdout", "stderr"]

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
        prefix: Returns the label of a line from its ranks.

    Args:
        names: How to name ranks.
    """

    def __init__(self, names: RankNames = ONE_NODE) -> None:
        self.prefix = lru_cache(maxsize=1024)(names.label)
        self.open: Line | None = None
        self.drawn: dict[Stream, str] = {}
        self._taken: list[Text | Shown] = []
        self._pieces: list[str] = []
        self._stream: Stream = "stdout"

    def take(self) -> list[Text | Shown]:
        """Return what has been written since the last call."""
        self._join()
        taken, self._taken = self._taken, []
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

    def draw(self, stream: Stream, line: str) -> None:
        """Show a progress line in place of the open one, or on a new line."""
        width = 0
        if self.open and self.open.stream == stream and not self.open.ranks:
            width = self.open.width
        elif self.open:
            self._write(self.open.stream, "\n")
        self._write(stream, "\r" + line.ljust(width))
        self.open = Line(stream, (), len(line))
        self.drawn[stream] = line

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
        self.drawn.clear()
        line, self.open = self.open, None
        if line is None:
            return
        if line.stream == stream and not line.ranks:
            self._write(stream, "\r" + " " * line.width + "\r")  # the bar will be redrawn below
        else:
            self._write(line.stream, "\n")

    def _write(self, stream: Stream, text: str) -> None:
        if stream != self._stream:
            self._join()
            self._stream = stream
        self._pieces.append(text)

    def _join(self) -> None:
        if self._pieces:
            self._taken.append(Text(self._stream, "".join(self._pieces)))
            self._pieces = []
