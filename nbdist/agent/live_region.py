r"""What a rank draws again and again over several lines of a terminal, as one line that rewrites itself.

No page has a terminal's cursor, but all that reads ranks' output knows lines with carriage returns, as of one bar of
tqdm. So lines that may be drawn again are held, and shown as one line after "\r" as long as they change:

- rich hides the cursor, prints some lines, moves the cursor up while it erases them, and prints them again. Those above
  the highest that it has erased come out as lines; the others do when the cursor is shown again. A program that
  hides the cursor for something else prints lines that nothing erases: they can be released after a while.
- tqdm draws a bar within another bar's loop one line below it, and moves the cursor up again. Lines come out that it
  can't reach any more, and all of them after a newline that the cursor does not come back from.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod

_HIDE, _SHOW = b"\x1b[?25l", b"\x1b[?25h"
_MOVE_UP = b"\x1b[A"
_TOKEN = re.compile(rb"(?:\x1b\[\d*A)+|\x1b\[[0-?]*[@-~]|\n|\r|[^\x1b\r\n]+|\x1b")
_UP = re.compile(rb"\x1b\[(\d*)A")
_ERASE = (b"\x1b[K", b"\x1b[0K", b"\x1b[2K")
_COLOR = re.compile(rb"\x1b\[[0-9;]*m")
_ERASED = re.compile(rb"\r?(?:\x1b\[\d*A\x1b\[2K)+")  # at the end, as what is drawn is not to stay
# What moves a cursor, clears a screen, or sets a terminal's modes: where nothing is drawn, a page shows it as text.
_UNDRAWN = re.compile(rb"\x1b\[[0-?]*[A-HJSTfhlnsu]")
_CUT = re.compile(rb"\x1b(\[[0-?]*)?\Z")  # a code whose end is still to come
_WIPE = b"\r \r"  # for readers: what comes next is no state of what was there
_DRAWN_ROWS, _DRAWN_BYTES = 4, 1024  # of what is shown while it changes; of more, as a table, only the last state is
_HELD_ROWS, _HELD_BYTES = 128, 1 << 16


class LiveOutput:
    """One stream of a rank, which may draw at its end."""

    def __init__(self) -> None:
        self._region: _Region | None = None
        self._line = b""  # the last state of the line that has not ended

    def is_drawn_by(self, data: bytes) -> bool:
        """Return whether these bytes, which come next, are part of a drawing: best read as they were written."""
        return self._region is not None or _HIDE in data or _MOVE_UP in data

    def may_go_on_below(self, data: bytes) -> bool:
        """Return whether these bytes, which come next, end a bar's line: another may come below, and the way back."""
        if not data.endswith(b"\n"):
            return False
        begin = data.rfind(b"\n", 0, -1) + 1
        return b"\r" in data[begin:] or (begin == 0 and self._line.startswith(b"\r"))

    @property
    def is_drawing(self) -> bool:
        """Whether something may be held."""
        return self._region is not None

    @property
    def holds_lines(self) -> bool:
        """Whether lines are held, not shown, and may never be drawn again: none of them has been erased."""
        return isinstance(self._region, _Hidden) and self._region.holds_lines

    def release(self) -> bytes:
        """Return these lines; they are not held any longer."""
        return self._region.release() if isinstance(self._region, _Hidden) else b""

    def feed(self, data: bytes) -> bytes:
        """Return what readers get instead of these bytes.

        They may be cut anywhere but within or behind the codes that hide and show the cursor: these come at once.
        """
        shown: list[bytes] = []
        rest: bytes | None = data
        while rest is not None:
            if self._region is None:
                before, hides, after = rest.partition(_HIDE)
                if _MOVE_UP in before:
                    self._region = _Nested(self._line)
                else:
                    before = _UNDRAWN.sub(b"", before) if b"\x1b[" in before else before
                    self._note(before)
                    shown.append(before)
                    if not hides:
                        break
                    self._region, rest = _Hidden(), after
            part, rest = self._region.feed(rest)
            shown.append(part)
            if rest is not None:
                shown.append(self.end())
        return b"".join(shown)

    def end(self) -> bytes:
        """Return what is held, as lines: nothing of it is drawn again."""
        region, self._region, self._line = self._region, None, b""
        return b"" if region is None else region.end()

    def _note(self, data: bytes) -> None:
        line = (self._line + data[-_DRAWN_BYTES:])[-_DRAWN_BYTES:]
        line = line[line.rfind(b"\n") + 1 :]
        self._line = line[max(0, line.rfind(b"\r")) :]


class _Region(ABC):
    """The last rows of a terminal with its cursor, as far as they may be drawn again.

    A row that was written after a carriage return begins with it.

    Args:
        rows: That are there.
    """

    def __init__(self, *rows: bytes) -> None:
        self._rows = list(rows)
        self._row = len(rows) - 1
        self._overwrites = False  # what comes next stands in place of the cursor's row
        self._drawn = b""
        self._cut = b""  # the begin of a code

    @abstractmethod
    def feed(self, data: bytes) -> tuple[bytes, bytes | None]:
        """Return what is shown now, and what comes after the end of the region; None: it goes on."""

    @abstractmethod
    def end(self) -> bytes:
        """Return all rows as lines, the first one in the place of what is drawn now."""

    def _whole(self, data: bytes) -> bytes:
        """Return what has come without the begin of a code at its end, which is kept for the next time."""
        data = self._cut + data
        cut = _CUT.search(data)
        self._cut = cut[0] if cut else b""
        return data[: len(data) - len(self._cut)]

    def _write(self, token: bytes) -> None:
        """Do as a terminal does with anything but a newline."""
        if token == b"\r":
            self._overwrites = True
        elif token.startswith(b"\x1b") and (ups := _UP.findall(token)):
            self._row = max(0, self._row - sum(int(up or 1) for up in ups))
        elif not token.startswith(b"\x1b") or _COLOR.fullmatch(token):
            self._rows[self._row] = b"\r" + token if self._overwrites else self._rows[self._row] + token
            self._overwrites = False

    def _move_down(self) -> None:
        self._row += 1
        if self._row == len(self._rows):
            self._rows.append(b"")
        self._overwrites = bool(self._rows[self._row])

    def _is_too_much(self) -> bool:
        return sum(map(len, self._rows)) > _HELD_BYTES

    def _drawing(self) -> bytes:
        """Return all rows as one line."""
        return b"  ".join(_text(row) for row in self._rows if _is_visible(row))

    def _draw(self) -> bytes:
        """Return what is drawn now, if it has changed."""
        drawn = self._drawing()
        if drawn == self._drawn or len(self._rows) > _DRAWN_ROWS or len(drawn) > _DRAWN_BYTES:
            return b""
        self._drawn = drawn
        return b"\r" + drawn


class _Hidden(_Region):
    """What is drawn until the cursor is shown again."""

    def __init__(self) -> None:
        super().__init__(b"")
        self._is_erased = False  # so what comes next is drawn from the cursor's row on
        self._erases = False  # anything, so far

    @property
    def holds_lines(self) -> bool:
        return not self._erases and self._row > 0 and self._drawing() != self._drawn

    def feed(self, data: bytes) -> tuple[bytes, bytes | None]:
        data = self._whole(data)
        shown: list[bytes] = []
        for token in _TOKEN.finditer(data):
            if token[0] == _SHOW:
                rest = data[token.end() :] + self._cut
                if (erased := _ERASED.match(rest)) is not None:
                    self._row = max(0, self._row - erased[0].count(b"A"))
                    self._rows[self._row :] = [b""]
                    rest = rest[erased.end() :]
                return b"".join(shown), rest
            shown.append(self._take(token[0]))
        if self._is_too_much():
            return b"".join(shown), b""
        if not self._is_erased and _is_visible(self._rows[self._row]):  # it is complete
            shown.append(self._draw())
        return b"".join(shown), None

    def end(self) -> bytes:
        rows = self._rows if _is_visible(self._rows[-1]) else self._rows[:-1]
        if not rows and self._drawn:
            return _WIPE
        return b"".join(b"\r%s\n" % _text(row) for row in rows)

    def _take(self, token: bytes) -> bytes:
        """Do as a terminal does. Returns lines that are not drawn again."""
        if token in _ERASE:
            self._rows[self._row :] = [b""]
            self._is_erased = self._erases = True
            return b""
        above = b""
        if self._is_erased and (token == b"\n" or not token.startswith((b"\r", b"\x1b"))):
            above = self.release()
        if token != b"\n":
            self._write(token)
            return above
        self._move_down()
        return above + (self.release() if len(self._rows) > _HELD_ROWS else b"")

    def release(self) -> bytes:
        """Return the rows above the cursor as lines, in the place of what is drawn now."""
        above, self._rows = self._rows[: self._row], self._rows[self._row :]
        self._row = 0
        self._is_erased = False
        if above:
            self._drawn = b""
        return b"".join(_WIPE + _text(row) + b"\n" for row in above)


class _Nested(_Region):
    """What is drawn by moves to the next line and back.

    Args:
        line: That the cursor is in.
    """

    def __init__(self, line: bytes) -> None:
        above = () if line else (b"\r",)  # the one above the cursor has come out already
        super().__init__(*above, line)
        self._reach = 1  # rows that the cursor is moved up at most

    def feed(self, data: bytes) -> tuple[bytes, bytes | None]:
        data = self._whole(data)
        last_up = data.rfind(_MOVE_UP)
        shown: list[bytes] = []
        for token in _TOKEN.finditer(data):
            if token[0] != b"\n":
                self._reach = min(_HELD_ROWS, max(self._reach, token[0].count(_MOVE_UP)))
                self._write(token[0])
                continue
            if token.end() > last_up and not any(map(_is_visible, self._rows[self._row + 1 :])):
                del self._rows[self._row + 1 :]
                return b"".join(shown), data[token.end() :] + self._cut
            self._move_down()
            shown.append(self._release(self._row - self._reach))
        if self._is_too_much():
            return b"".join(shown), b""
        return b"".join([*shown, self._draw()]), None

    def end(self) -> bytes:
        if not self._rows[-1]:
            self._rows.pop()
        return self._release(len(self._rows)) or (_WIPE if self._drawn else b"")

    def _release(self, count: int) -> bytes:
        """Return the first rows as lines, in the place of what is drawn now."""
        rows, self._rows = self._rows[: max(0, count)], self._rows[max(0, count) :]
        self._row -= len(rows)
        lines = [row if row.startswith(b"\r") else _WIPE + row for row in rows if _is_visible(row) or not row]
        if lines:
            self._drawn = b""
        return b"".join(line + b"\n" for line in lines)


def _text(row: bytes) -> bytes:
    return row.removeprefix(b"\r").rstrip(b" ")


def _is_visible(row: bytes) -> bool:
    return bool(_COLOR.sub(b"", row).strip())
