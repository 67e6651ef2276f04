"""The session's output log: all that ranks print, cell by cell, in files of bounded size. Knows nothing of the wire."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import struct
import tempfile
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path

_LIMIT = 1 << 30
_PARTS = 16  # files into which a log of full size is cut; the oldest makes room
_HEADER = struct.Struct("<HBI")  # rank, stream, length


@dataclass
class _Segment:
    """A file of whole records. `start` is the place of its first byte in the cell's log."""

    path: Path
    start: int
    size: int = 0


@dataclass
class _Cell:
    number: int
    segments: deque[_Segment] = field(default_factory=deque)
    end: int = 0  # bytes logged, dropped ones too
    file: int = -1  # descriptor of the last segment
    failed: bool = False

    @property
    def dropped(self) -> int:
        """Bytes at the beginning that have made room for others."""
        return self.segments[0].start if self.segments else self.end


@dataclass(frozen=True)
class LogPart:
    """Some of what a cell printed.

    Attributes:
        number: The cell's number in the notebook.
        records: Rank, stream and bytes of each, in the order in which they came.
        next: Where to read on; None: this was the last part.
    """

    number: int
    records: list[tuple[int, int, bytes]]
    next: tuple[int, int] | None


class OutputLog:
    """Writes and reads the log.

    Args:
        limit: Bytes that all files may have together; what is oldest makes room.
    """

    def __init__(self, limit: int = _LIMIT) -> None:
        self._limit = limit
        self._size = 0
        self._cells: dict[int, _Cell] = {}
        self._told = False
        self.folder: Path | None = None
        with contextlib.suppress(OSError):  # no temporary folder at all: the first write says so
            self.folder = Path(tempfile.gettempdir()) / f"nbdist-{secrets.token_hex(8)}"

    def begin(self, serial: int, number: int) -> None:
        """A cell starts. Only cells that print keep a file open, and only until another starts."""
        for cell in self._cells.values():
            _close(cell)
        self._cells[serial] = _Cell(number)

    def write(self, serial: int, rank: int, stream: int, data: bytes) -> str | None:
        """Add what a rank printed. Never raises.

        Returns:
            A line for the user when the log can't keep what it should, once.
        """
        cell = self._cells.get(serial)
        if cell is None or cell.failed:
            return None
        try:
            self._append(serial, cell, _HEADER.pack(rank, stream, len(data)) + data)
        except OSError as error:
            return self._fail(cell, error)
        self._told = False
        whole = not cell.dropped
        self._make_room()
        if whole and cell.dropped:
            return (
                f"this cell has printed more than the output log holds ({self._limit / 1e9:.1f} GB): "
                "the log keeps the newest part"
            )
        return None

    def read(self, number: int | None, size: int, position: tuple[int, int] | None = None) -> LogPart | None:
        """Part of what a cell printed. Call it again with the part's `next` until that is None.

        Args:
            number: The cell's number in the notebook; None: the newest that printed.
            size: Bytes to read at most, but at least one record.
            position: `next` of the part before.

        Returns:
            None: the log has nothing of such a cell.
        """
        serials = self._serials(number)
        if position is not None:
            serials = [serial for serial in serials if serial >= position[0]]
        if not serials:
            return None
        serial = serials[0]
        cell = self._cells[serial]
        offset = position[1] if position is not None and position[0] == serial else 0
        offset = max(offset, cell.dropped)
        try:
            data = _read_records(cell, offset, size)
        except OSError:  # somebody has tidied up the temporary folder
            return None
        offset += len(data)
        following: tuple[int, int] | None = (serial, offset)
        if offset >= cell.end or not data:
            following = (serials[1], 0) if len(serials) > 1 else None
        return LogPart(cell.number, _parse(data), following)

    def close(self) -> None:
        """Remove every file."""
        for cell in self._cells.values():
            _close(cell)
        if self.folder is not None:
            shutil.rmtree(self.folder, ignore_errors=True)

    def _serials(self, number: int | None) -> list[int]:
        """Everything that printed in one cell of the notebook: a local cell may run code on ranks several times."""
        printed = [serial for serial, cell in self._cells.items() if cell.segments]
        if number is None and printed:
            number = self._cells[printed[-1]].number
            if not number:  # outside of a notebook
                return printed[-1:]
        return [serial for serial in printed if self._cells[serial].number == number]

    def _append(self, serial: int, cell: _Cell, record: bytes) -> None:
        last = cell.segments[-1] if cell.segments else None
        if last is None or last.size >= self._limit // _PARTS:
            _close(cell)
            last = self._new_segment(serial, cell)
        if cell.file < 0:
            cell.file = os.open(last.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        rest = memoryview(record)
        try:
            while rest:
                rest = rest[os.write(cell.file, rest) :]
        except OSError:
            os.ftruncate(cell.file, last.size)  # only whole records
            raise
        last.size += len(record)
        cell.end += len(record)
        self._size += len(record)

    def _new_segment(self, serial: int, cell: _Cell) -> _Segment:
        if self.folder is None:
            raise FileNotFoundError(2, "there is no folder to write to")
        self.folder.mkdir(mode=0o700, exist_ok=True)
        segment = _Segment(self.folder / f"{serial}-{cell.end}", cell.end)
        cell.segments.append(segment)
        return segment

    def _make_room(self) -> None:
        for cell in self._cells.values():
            while self._size > self._limit and len(cell.segments) > (1 if cell.file >= 0 else 0):
                segment = cell.segments.popleft()
                segment.path.unlink(missing_ok=True)
                self._size -= segment.size
            if self._size <= self._limit:
                return

    def _fail(self, cell: _Cell, error: OSError) -> str | None:
        cell.failed = True
        _close(cell)
        if self._told:
            return None
        self._told = True
        where = self.folder.parent if self.folder is not None else "the temporary folder"
        return (
            f"the output log can't keep what this cell prints: {error.strerror} in {where}. "
            "The cell runs on and shows its output. Free some space there, or set TMPDIR before you start Jupyter."
        )


def _read_records(cell: _Cell, offset: int, size: int) -> bytes:
    """Whole records from one segment, at least one."""
    segment = next((each for each in cell.segments if offset < each.start + each.size), None)
    if segment is None:
        return b""
    with segment.path.open("rb") as file:
        file.seek(offset - segment.start)
        data = file.read(max(size, _HEADER.size))
        end = _end_of_whole(data)
        if not end:
            end = _HEADER.size + _HEADER.unpack_from(data)[2]
            data += file.read(end - len(data))
        return data[:end]


def _end_of_whole(data: bytes) -> int:
    """Where the last record that is all there ends."""
    end = 0
    while end + _HEADER.size <= len(data):
        following = end + _HEADER.size + _HEADER.unpack_from(data, end)[2]
        if following > len(data):
            break
        end = following
    return end


def _close(cell: _Cell) -> None:
    if cell.file >= 0:
        os.close(cell.file)
        cell.file = -1


def _parse(data: bytes) -> list[tuple[int, int, bytes]]:
    records, offset = [], 0
    while offset < len(data):
        rank, stream, length = _HEADER.unpack_from(data, offset)
        offset += _HEADER.size
        records.append((rank, stream, data[offset : offset + length]))
        offset += length
    return records
