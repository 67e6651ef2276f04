"""A disk that is slow or hangs delays nothing but the log, and what the log leaves out is counted."""

from __future__ import annotations

import os
import select
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from nbdist.controller.base.logwriter import LogWriter
from nbdist.controller.base.outputlog import OutputLog, Part

LIMIT = 10.0  # seconds; nothing here takes as long
CELL = 7, 3  # serial and number
RECORD = b"x" * 1000


class HangingDisk:
    """A log whose first file is a pipe that nobody reads: opening it hangs until `heal`."""

    def __init__(self, folder: Path) -> None:
        self.log = OutputLog()
        self.lines: list[str] = []
        assert self.log.folder is not None and self.log.folder.parent == folder
        self.log.folder.mkdir()
        self._pipe = self.log.folder / "0"
        os.mkfifo(self._pipe)
        self.writer = LogWriter(self.log, self.lines.append, limit=10_000)
        self._end: int | None = None

    def heal(self) -> None:
        """Let it go on: what is written goes nowhere."""
        self._end = os.open(self._pipe, os.O_RDONLY | os.O_NONBLOCK)

    def close(self) -> None:
        if self._end is None:
            self.heal()
        self.writer.close()
        assert self._end is not None
        os.close(self._end)


@pytest.fixture
def hanging(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HangingDisk]:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    disk = HangingDisk(tmp_path)
    yield disk
    disk.close()


@pytest.fixture
def writer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LogWriter]:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    writer = LogWriter(OutputLog(), lambda line: None)
    yield writer
    writer.close()
    assert list(tmp_path.iterdir()) == []


def finish_until(writer: LogWriter, reached: threading.Event | list[Part | None] | list[str]) -> None:
    while not (reached.is_set() if isinstance(reached, threading.Event) else reached):
        assert select.select([writer], [], [], LIMIT)[0], "the log does not answer"
        writer.finish()


def read(writer: LogWriter) -> Part | None:
    parts: list[Part | None] = []
    writer.read(parts.append, serials=[CELL[0]])
    finish_until(writer, parts)
    return parts[0]


def test_what_was_written_before_a_question_is_in_its_answer(writer: LogWriter) -> None:
    for i in range(100):
        writer.write(*CELL, 0, 1, b"%d" % i)
    part = read(writer)
    assert part is not None and part.records == [(0, 1, b"%d" % i) for i in range(100)]


def test_who_wants_to_know_hears_when_the_log_has_taken_it(writer: LogWriter) -> None:
    taken = threading.Event()
    writer.write(*CELL, 0, 1, RECORD, taken.set)
    finish_until(writer, taken)


def test_a_disk_that_hangs_holds_up_nobody_who_writes_or_asks(hanging: HangingDisk) -> None:
    parts: list[Part | None] = []
    for _ in range(100):
        hanging.writer.write(*CELL, 0, 1, RECORD)
    hanging.writer.read(parts.append, serials=[CELL[0]])
    hanging.writer.finish()
    assert parts == []  # and here we are


def test_what_does_not_fit_into_memory_meanwhile_is_left_out_and_counted(hanging: HangingDisk) -> None:
    for _ in range(100):
        hanging.writer.write(*CELL, 0, 1, RECORD)
    (complaint,) = hanging.lines
    assert "can't keep up" in complaint and str(hanging.log.folder.parent) in complaint  # type: ignore[union-attr]
    hanging.heal()
    del hanging.lines[:]
    finish_until(hanging.writer, hanging.lines)
    assert hanging.lines == ["the output log continues; 0.1 MB are missing from it"]


def test_whose_output_is_left_out_hears_when_all_before_it_is_done(hanging: HangingDisk) -> None:
    taken = threading.Event()
    for _ in range(100):
        hanging.writer.write(*CELL, 0, 1, RECORD)
    hanging.writer.write(*CELL, 0, 1, RECORD, taken.set)
    hanging.writer.finish()
    assert not taken.is_set()
    hanging.heal()
    finish_until(hanging.writer, taken)


def test_a_part_says_how_much_was_left_out(hanging: HangingDisk) -> None:
    for _ in range(100):
        hanging.writer.write(*CELL, 0, 1, RECORD)
    hanging.heal()
    part = read(hanging.writer)
    assert part is not None and part.missing == 90 * len(RECORD)


def test_a_log_whose_disk_hangs_is_closed_all_the_same(hanging: HangingDisk) -> None:
    hanging.writer.write(*CELL, 0, 1, RECORD)
    hanging.writer.close()
