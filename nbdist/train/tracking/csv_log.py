"""A CSV file that grows by a row at a time, and by columns when new ones come. Independent of trackers or ranks."""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Mapping, Sequence
from pathlib import Path


class CsvLog:
    """A file with one row for each call of `add`; an existing file is appended to.

    Args:
        path: The file.
        first: Names of the columns that come first.

    Raises:
        ValueError: The file is something else.
    """

    def __init__(self, path: Path, first: Sequence[str]) -> None:
        self._path = path
        self._columns = list(first)
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists() and path.stat().st_size:
            self._continue()
        else:
            self._replace([self._columns])

    def add(self, row: Mapping[str, object]) -> None:
        """Append a row. It is in the file when this returns."""
        new = [name for name in row if name not in self._columns]
        if new:
            self._widen(new)
        with self._path.open("a", newline="", encoding="utf-8") as file:
            file.write(_line([str(row.get(name, "")) for name in self._columns]))

    def _continue(self) -> None:
        content = self._path.read_text(encoding="utf-8")
        rows = list(csv.reader(io.StringIO(content)))
        if rows[0][: len(self._columns)] != self._columns:
            raise ValueError(f"its first line is {rows[0]}, not that of a log")
        self._columns = rows[0]
        if not content.endswith("\n"):  # a process was killed while it wrote the last line
            self._replace(rows[:-1] or [self._columns])

    def _widen(self, new: Sequence[str]) -> None:
        with self._path.open(newline="", encoding="utf-8") as file:
            rows = list(csv.reader(file))
        self._columns += new
        self._replace([self._columns, *(row + [""] * (len(self._columns) - len(row)) for row in rows[1:])])

    def _replace(self, rows: Sequence[Sequence[str]]) -> None:
        """Write the whole file again, all at once."""
        beside = self._path.with_name(f"{self._path.name}.partial")
        beside.write_text("".join(map(_line, rows)), encoding="utf-8", newline="")
        os.replace(beside, self._path)


def _line(values: Sequence[str]) -> str:
    buffer = io.StringIO()
    csv.writer(buffer, lineterminator="\n").writerow(values)
    return buffer.getvalue()
