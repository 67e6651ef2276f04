"""The session's output log: all that ranks print, in one ring of files, with an index of its cells.

Independent of the wire. It blocks on the disk: `logwriter` calls it from a thread.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
import struct
import tempfile
from collections import Counter, OrderedDict, deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path

_LIMIT = 1 << 30
_PARTS = 16  # files into which a full log is divided; the oldest is dropped first
CELLS = 50_000  # size of the index: the cells that printed last
_HEADER = struct.Struct("<QHBI")  # cell, rank, stream, length
_BLOCK = 1 << 20  # bytes that are read at once
_SCAN = 16  # blocks that one question may scan
_ENDS = 64  # cells, the newest, of which it is known where each rank's end is
_RECORDS, _LEAST = 16, 1024  # of a rank's end, when others have printed more since: its last records, and their bytes


_LINE_BEGIN = re.compile(rb"\n|(?=\r)")


@dataclass
class _Segment:
    """A file of whole records.

    start: the position of its first byte in the log. cells: bytes of each cell in it.
    """

    path: Path
    start: int
    size: int = 0
    cells: dict[int, int] = field(default_factory=dict)

    @property
    def end(self) -> int:
        return self.start + self.size


@dataclass(slots=True)
class _Cell:
    """Where a cell's records are, and how much of its output is not among them.

    dropped: bytes dropped at its beginning to make room. missing: bytes that could not be written.
    """

    number: int
    start: int
    end: int
    size: int = 0
    dropped: int = 0
    missing: int = 0
    failed: bool = False


@dataclass(slots=True)
class _RankEnd:
    """Where the last records of a rank are. count: all that it has in its cell."""

    count: int = 0
    positions: deque[int] = field(default_factory=lambda: deque(maxlen=_RECORDS))


@dataclass(frozen=True)
class Part:
    """Part of what was printed.

    Attributes:
        serials: The cells it belongs to, to pass to the next `read`.
        number: Their number in the notebook.
        records: Rank, stream and bytes of each, in the order in which they came.
        next: Position to continue reading from; None at the end.
        size: Bytes of these cells in the log, over all ranks.
        dropped: Bytes dropped at their beginning to make room for newer output.
        missing: Bytes that could not be written.
        end: Position behind the records, where what is printed later will be.
    """

    serials: list[int]
    number: int
    records: list[tuple[int, int, bytes]]
    next: int | None
    size: int
    dropped: int
    missing: int
    end: int


@dataclass(frozen=True)
class LastOutput:
    """The end of what a cell has printed, from whole lines. printed: bytes of all of it. records: as in Part."""

    printed: int
    records: list[tuple[int, int, bytes]]


@dataclass(frozen=True)
class NewOutput:
    """What was printed behind a position.

    Attributes:
        records: Cell, rank, stream and bytes of each, in the order in which they came.
        position: Where the next such part begins.
        whole: Whether there is nothing behind it.
        dropped: Bytes of the log before it that have made room for newer ones meanwhile.
    """

    records: list[tuple[int, int, int, bytes]]
    position: int
    whole: bool
    dropped: int


class OutputLog:
    """Writes and reads the log.

    A position counts all bytes ever written, so it stays valid when the oldest output is dropped.

    Args:
        limit: Maximum size of all files together, in bytes.
    """

    def __init__(self, limit: int = _LIMIT) -> None:
        self._limit = limit
        self._segments: deque[_Segment] = deque()
        self._cells: OrderedDict[int, _Cell] = OrderedDict()  # ordered by their last records
        self._ends: OrderedDict[int, dict[int, _RankEnd]] = OrderedDict()
        self._end = 0
        self._file = -1  # descriptor of the last segment
        self._newest = 0  # the cell that printed last
        self._told = False
        self.folder: Path | None = None
        with contextlib.suppress(OSError):  # no temporary folder at all: the first write reports it
            self.folder = Path(tempfile.gettempdir()) / f"nbdist-{secrets.token_hex(8)}"

    @property
    def parent(self) -> str:
        """The folder to name in messages to the user."""
        return str(self.folder.parent) if self.folder is not None else "the temporary folder"

    # --- writing

    def write(self, serial: int, number: int, rank: int, stream: int, data: bytes) -> str | None:
        """Add what a rank printed in the cell `serial`. Never raises.

        Returns:
            A line for the user the first time the log can't keep everything, else None.
        """
        cell = self._cell(serial, number)
        if cell.failed:
            cell.missing += len(data)
            return None
        whole = not cell.dropped
        try:
            self._append(serial, cell, rank, _HEADER.pack(serial, rank, stream, len(data)) + data)
            self._make_room()
        except OSError as error:
            return self._fail(cell, len(data), error)
        self._told = False
        if whole and cell.dropped:
            return (
                f"this cell has printed more than the output log has room for ({self._limit / 1e9:.1f} GB): "
                "only the newest part is kept"
            )
        return None

    def miss(self, serial: int, number: int, size: int) -> None:
        """Count bytes of a cell that were never written."""
        self._cell(serial, number).missing += size

    def clear(self) -> None:
        """Forget everything: the session has ended."""
        self._close_file()
        for segment in self._segments:
            with contextlib.suppress(OSError):
                segment.path.unlink(missing_ok=True)
        self._segments.clear()
        self._cells.clear()
        self._ends.clear()

    def close(self) -> None:
        """Remove every file."""
        self.clear()
        if self.folder is not None:
            shutil.rmtree(self.folder, ignore_errors=True)

    def _cell(self, serial: int, number: int) -> _Cell:
        cell = self._cells.get(serial)
        if cell is not None:
            self._cells.move_to_end(serial)
            return cell
        if len(self._cells) >= CELLS:
            oldest, _ = self._cells.popitem(last=False)
            for segment in self._segments:
                segment.cells.pop(oldest, None)
        cell = self._cells[serial] = _Cell(number, self._end, self._end)
        self._ends[serial] = {}
        if len(self._ends) > _ENDS:
            self._ends.popitem(last=False)
        return cell

    def _append(self, serial: int, cell: _Cell, rank: int, record: bytes) -> None:
        segment = self._segment_for(serial)
        if self._file < 0:
            self._file = os.open(segment.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        rest = memoryview(record)
        try:
            while rest:
                rest = rest[os.write(self._file, rest) :]
        except OSError:
            os.ftruncate(self._file, segment.size)  # only whole records
            raise
        if (ends := self._ends.get(serial)) is not None:
            end = ends.setdefault(rank, _RankEnd())
            end.count += 1
            end.positions.append(segment.end)
        printed = len(record) - _HEADER.size
        segment.size += len(record)
        segment.cells[serial] = segment.cells.get(serial, 0) + printed
        self._end = cell.end = segment.end
        cell.size += printed

    def _segment_for(self, serial: int) -> _Segment:
        """Return the file that the next record goes to."""
        last = self._segments[-1] if self._segments else None
        if serial != self._newest:
            self._newest = serial
            if self._file >= 0 and not os.fstat(self._file).st_nlink:  # the temporary folder was cleaned up
                last = None
        if last is not None and last.size < self._limit // _PARTS:
            return last
        self._close_file()
        if self.folder is None:
            raise FileNotFoundError(2, "there is no folder to write to")
        self.folder.mkdir(mode=0o700, exist_ok=True)
        segment = _Segment(self.folder / str(self._end), self._end)
        self._segments.append(segment)
        return segment

    def _make_room(self) -> None:
        if self._end - self._segments[0].start <= self._limit:
            return
        while len(self._segments) > 1 and self._end - self._segments[0].start > self._limit:
            self._drop(self._segments.popleft())
        start = self._segments[0].start
        for serial in [serial for serial, cell in self._cells.items() if cell.end <= start]:
            del self._cells[serial]

    def _drop(self, segment: _Segment) -> None:
        """Forget the records of a segment that was removed."""
        for serial, size in segment.cells.items():
            if (cell := self._cells.get(serial)) is not None:
                cell.dropped += size
                cell.size -= size
        with contextlib.suppress(OSError):
            segment.path.unlink(missing_ok=True)

    def _fail(self, cell: _Cell, size: int, error: OSError) -> str | None:
        cell.failed = True
        cell.missing += size
        if self._told:
            return None
        self._told = True
        return (
            f"the output log can't keep what this cell prints: {error.strerror} in {self.parent}. "
            "The cell still runs and shows its output. Free some space there, or set TMPDIR before you start Jupyter."
        )

    def _close_file(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    # --- reading

    def read(
        self,
        serials: Collection[int] = (),
        number: int | None = None,
        *,
        ranks: Collection[int] | None = None,
        position: int = 0,
        size: int = _BLOCK,
    ) -> Part | None:
        """Return part of what cells printed. Call again with the part's `serials` and `next` until `next` is None.

        Args:
            serials: Which cells; if empty, those with this number.
            number: The cell's number in the notebook; None for the newest that printed.
            ranks: Whose output; None for all ranks.
            position: `next` of the previous part.
            size: Maximum bytes to return, but at least one record; none if all that was scanned is of other cells.

        Returns:
            The part, or None if the log has nothing from such a cell.
        """
        chosen = {serial: self._cells[serial] for serial in serials or self._serials(number) if serial in self._cells}
        if not chosen:
            return None
        position = max(position, min(cell.start for cell in chosen.values()))
        end = max(cell.end for cell in chosen.values())
        records: list[tuple[int, int, bytes]] = []
        for _ in range(_SCAN):
            position, found = self._read_block(position, size, chosen, ranks)
            records += [record[1:] for record in found]
            size -= sum(len(data) for *_, data in found)
            if size <= 0 or position >= end:
                break
        if not any(cell.size or cell.missing for cell in chosen.values()):
            return None
        return Part(
            list(chosen),
            next(iter(chosen.values())).number,
            records,
            position if position < end else None,
            sum(cell.size for cell in chosen.values()),
            sum(cell.dropped for cell in chosen.values()),
            sum(cell.missing for cell in chosen.values()),
            position,
        )

    def tail(self, serial: int, size: int) -> LastOutput:
        """Return the end of what a cell has printed; all of it where that is less.

        Args:
            serial: The cell.
            size: Bytes, or a record more: the newest. Before them is the end of each rank that has few among them, as
                it ended before the others or prints less.
        """
        cell = self._cells.get(serial)
        if cell is None:
            return LastOutput(0, [])
        records: deque[tuple[int, int, bytes]] = deque()
        held = 0
        position = self._start_of_tail(serial, size)
        while position < cell.end:
            position, found = self._read_block(position, _BLOCK, [serial], None)
            records += [record[1:] for record in found]
            held += sum(len(data) for *_, data in found)
            while len(records) > 1 and held - len(records[0][2]) >= size:
                held -= len(records.popleft()[2])
        printed, ends = cell.size + cell.dropped + cell.missing, self._ends.get(serial, {})
        if held >= printed:
            return LastOutput(printed, list(records))
        counts = Counter(rank for rank, *_ in records)
        early = sorted((rank for rank in ends if counts[rank] < _RECORDS), key=lambda rank: ends[rank].positions[-1])
        budget = max(_LEAST, size // max(1, len(ends)))
        before = [record for rank in early for record in self._end_of(ends[rank], counts[rank], budget)]
        shown = [*before, *records]
        counts += Counter(rank for rank, *_ in before)
        whole = {rank for rank, end in ends.items() if counts[rank] == end.count}
        return LastOutput(printed, _from_whole_lines(shown, whole))

    def follow(self, position: int, size: int = _BLOCK) -> NewOutput:
        """Return what all cells have printed behind a position that an earlier call has returned.

        Args:
            position: The position; -1 for the log's end.
            size: Maximum bytes to return, but at least one record.
        """
        if position < 0:
            return NewOutput([], self._end, True, 0)
        start = max(position, self._segments[0].start if self._segments else self._end)
        following, records = self._read_block(start, size, self._cells, None)
        return NewOutput(records, following, following >= self._end, start - position)

    def _end_of(self, end: _RankEnd, known: int, size: int) -> list[tuple[int, int, bytes]]:
        """Return the last records of a rank but for those that are known; those of a size, but at least one."""
        found: list[tuple[int, int, bytes]] = []
        for position in list(end.positions)[-1 - known :: -1]:
            segment = next((each for each in self._segments if each.start <= position < each.end), None)
            if segment is None:
                break
            try:
                _, rank, stream, data = _read_record(segment, position - segment.start)
            except OSError:
                break
            if found and len(data) > size:
                break
            size -= len(data)
            found.insert(0, (rank, stream, data))
        return found

    def _start_of_tail(self, serial: int, size: int) -> int:
        """Return the start of a segment from which on there are so many bytes of a cell, or all of them."""
        start, held = self._end, 0
        for segment in reversed(self._segments):
            start = segment.start
            held += segment.cells.get(serial, 0)
            if held >= size or segment.start <= self._cells[serial].start:
                break
        return start

    def _serials(self, number: int | None) -> list[int]:
        """Return the serials of one notebook cell: a local cell may run code on ranks several times."""
        begun = sorted(self._cells, key=lambda serial: self._cells[serial].start)
        if number is None and begun:
            number = self._cells[begun[-1]].number
            if not number:  # outside a notebook
                return begun[-1:]
        return [serial for serial in begun if self._cells[serial].number == number]

    def _read_block(
        self, position: int, size: int, cells: Collection[int], ranks: Collection[int] | None
    ) -> tuple[int, list[tuple[int, int, int, bytes]]]:
        """Return records from one segment, each with its cell, and where the next one begins."""
        segment = next((each for each in self._segments if position < each.end), None)
        if segment is None:
            return self._end, []
        position = max(position, segment.start)
        try:
            data = _read_records(segment, position - segment.start)
        except OSError:  # the temporary folder was cleaned up, or the disk is broken
            if segment is not self._segments[-1]:
                self._segments.remove(segment)
            self._drop(segment)
            segment.cells.clear()
            return segment.end, []
        records: list[tuple[int, int, int, bytes]] = []
        offset = taken = 0
        while offset < len(data) and (taken < size or not records):
            serial, rank, stream, length = _HEADER.unpack_from(data, offset)
            offset += _HEADER.size
            if serial in cells and (ranks is None or rank in ranks):
                records.append((serial, rank, stream, data[offset : offset + length]))
                taken += length
            offset += length
        return position + offset, records


def _read_records(segment: _Segment, offset: int) -> bytes:
    """Return whole records from one segment, at least one."""
    with segment.path.open("rb") as file:
        file.seek(offset)
        data = file.read(min(_BLOCK, segment.size - offset))
        end = _end_of_whole(data)
        if not end:
            end = _HEADER.size + _HEADER.unpack_from(data)[3]
            data += file.read(end - len(data))
        return data[:end]


def _read_record(segment: _Segment, offset: int) -> tuple[int, int, int, bytes]:
    """Return the cell, rank, stream and bytes of one record."""
    with segment.path.open("rb") as file:
        file.seek(offset)
        serial, rank, stream, length = _HEADER.unpack(file.read(_HEADER.size))
        return serial, rank, stream, file.read(length)


def _from_whole_lines(
    records: Sequence[tuple[int, int, bytes]], whole: Collection[int]
) -> list[tuple[int, int, bytes]]:
    """Return records from the first whole line of each rank and stream; of ranks in `whole` nothing is left out."""
    begun: set[tuple[int, int]] = set()
    kept = []
    for rank, stream, data in records:
        start = 0
        if rank not in whole and (rank, stream) not in begun:
            begin = _LINE_BEGIN.search(data)
            start = len(data) if begin is None else begin.end()
            begun |= set() if begin is None else {(rank, stream)}
        if data[start:]:
            kept.append((rank, stream, data[start:]))
    return kept


def _end_of_whole(data: bytes) -> int:
    """Return the offset at which the last complete record ends."""
    end = 0
    while end + _HEADER.size <= len(data):
        following = end + _HEADER.size + _HEADER.unpack_from(data, end)[3]
        if following > len(data):
            break
        end = following
    return end
