"""The log keeps all that ranks print, in order, in files of bounded size, whatever the disk does."""

from __future__ import annotations

import errno
import os
import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from nbdist.controller.outputlog import OutputLog

Record = tuple[int, int, bytes]


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[OutputLog]:
    """A log of at most 64 kB."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    log = OutputLog(limit=64_000)
    yield log
    log.close()
    assert list(tmp_path.iterdir()) == []


@contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """Let writes fail as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


def read(log: OutputLog, number: int | None = None, size: int = 1000) -> list[Record] | None:
    records: list[Record] = []
    part = log.read(number, size)
    if part is None:
        return None
    while True:
        records += part.records
        if part.next is None:
            return records
        part = log.read(part.number, size, part.next)
        assert part is not None


def size_on_disk(log: OutputLog) -> int:
    assert log.folder is not None
    return sum(path.stat().st_size for path in log.folder.iterdir())


def test_what_was_written_is_read_in_order(log: OutputLog) -> None:
    log.begin(1, 7)
    records = [(i % 3, 1 + i % 2, b"%d\n" % i) for i in range(500)]
    for record in records:
        assert log.write(1, *record) is None
    assert read(log, 7) == records


@pytest.mark.parametrize("size", [1, 8, 100, 10**6])
def test_parts_of_any_size_join_to_the_whole(log: OutputLog, size: int) -> None:
    log.begin(1, 7)
    records = [(0, 1, b"x" * (i * 37 % 5000)) for i in range(20)]
    for record in records:
        log.write(1, *record)
    assert read(log, 7, size) == records


def test_the_newest_cell_that_printed_is_read_by_default(log: OutputLog) -> None:
    for serial, data in ((1, b"one"), (2, b"two"), (3, b"")):
        log.begin(serial, serial + 10)
        if data:
            log.write(serial, 0, 1, data)
    assert read(log) == [(0, 1, b"two")]


def test_everything_that_ran_under_one_number_is_one_log(log: OutputLog) -> None:
    for serial in (1, 2, 3):
        log.begin(serial, 5)
        log.write(serial, 0, 1, b"%d" % serial)
    assert read(log, 5) == [(0, 1, b"1"), (0, 1, b"2"), (0, 1, b"3")]


def test_outside_of_a_notebook_the_newest_is_read_alone(log: OutputLog) -> None:
    for serial in (1, 2):
        log.begin(serial, 0)
        log.write(serial, 0, 1, b"%d" % serial)
    assert read(log) == [(0, 1, b"2")]


def test_a_cell_that_printed_nothing_is_not_there(log: OutputLog) -> None:
    log.begin(1, 7)
    assert read(log, 7) is None
    assert read(log) is None


def test_a_cell_that_goes_on_in_the_background_is_kept_whole(log: OutputLog) -> None:
    log.begin(1, 1)
    log.write(1, 0, 1, b"a")
    log.begin(2, 2)
    log.write(2, 1, 1, b"other")
    log.write(1, 0, 1, b"b")
    assert read(log, 1) == [(0, 1, b"a"), (0, 1, b"b")]
    assert read(log, 2) == [(1, 1, b"other")]


def test_old_cells_make_room(log: OutputLog) -> None:
    for serial in range(1, 11):
        log.begin(serial, serial)
        for _ in range(10):
            assert log.write(serial, 0, 1, b"x" * 2000) is None
        assert size_on_disk(log) <= 64_000
    assert read(log, 1) is None
    assert read(log, 10) == [(0, 1, b"x" * 2000)] * 10


def test_of_a_cell_without_end_the_newest_part_is_kept_and_that_is_said_once(log: OutputLog) -> None:
    log.begin(1, 1)
    notices = [log.write(1, 0, 1, b"%06d" % i * 100) for i in range(1000)]
    assert size_on_disk(log) <= 64_000
    said = [notice for notice in notices if notice]
    assert len(said) == 1 and "newest" in said[0]
    records = read(log, 1)
    assert records is not None
    assert records == [(0, 1, b"%06d" % i * 100) for i in range(1000 - len(records), 1000)]
    assert len(records) * 600 > 50_000


def test_the_cell_after_one_without_end_is_logged(log: OutputLog) -> None:
    log.begin(1, 1)
    for _ in range(200):
        log.write(1, 0, 1, b"x" * 1000)
    log.begin(2, 2)
    assert log.write(2, 0, 1, b"next") is None
    assert read(log, 2) == [(0, 1, b"next")]


def test_reading_goes_on_when_what_comes_next_has_made_room_meanwhile(log: OutputLog) -> None:
    log.begin(1, 1)
    for i in range(100):
        log.write(1, 0, 1, b"%04d" % i * 500)
    part = log.read(1, 1, (1, 2007))
    assert part is not None and part.records[0][2][:4].isdigit()


def test_on_a_full_disk_it_is_said_once_and_what_was_written_stays_readable(log: OutputLog) -> None:
    log.begin(1, 1)
    log.write(1, 0, 1, b"before")
    with files_of_at_most(1000):
        notices = [log.write(1, 0, 1, b"x" * 700) for _ in range(5)]
    said = [notice for notice in notices if notice]
    assert len(said) == 1 and os.strerror(errno.EFBIG) in said[0] and "TMPDIR" in said[0]
    assert read(log, 1) == [(0, 1, b"before"), (0, 1, b"x" * 700)]


def test_the_next_cell_is_logged_once_there_is_space_again(log: OutputLog) -> None:
    log.begin(1, 1)
    with files_of_at_most(10):
        assert log.write(1, 0, 1, b"x" * 100)
    log.begin(2, 2)
    assert log.write(2, 0, 1, b"after") is None
    assert read(log, 2) == [(0, 1, b"after")]


def test_without_any_temporary_folder_cells_run_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> str:
        raise FileNotFoundError(errno.ENOENT, "No usable temporary directory found")

    monkeypatch.setattr("tempfile.gettempdir", fail)
    log = OutputLog()
    log.begin(1, 1)
    assert "Free some space" in (log.write(1, 0, 1, b"x") or "")
    assert log.write(1, 0, 1, b"x") is None
    log.close()


def test_files_that_somebody_has_deleted_are_not_there(log: OutputLog) -> None:
    log.begin(1, 1)
    log.write(1, 0, 1, b"x")
    assert log.folder is not None
    next(log.folder.iterdir()).unlink()
    assert read(log, 1) is None


def test_only_the_user_can_read_it(log: OutputLog) -> None:
    log.begin(1, 1)
    log.write(1, 0, 1, b"x")
    assert log.folder is not None
    assert log.folder.stat().st_mode & 0o777 == 0o700
    assert next(log.folder.iterdir()).stat().st_mode & 0o777 == 0o600
