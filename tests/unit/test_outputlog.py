"""The log keeps all that ranks print, in order, in files of bounded size, whatever the disk does."""

from __future__ import annotations

import errno
import os
import resource
import shutil
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from nbdist.controller.base.outputlog import OutputLog

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


def read(log: OutputLog, number: int | None = None, size: int = 1000, **which: Any) -> list[Record] | None:
    records: list[Record] = []
    part = log.read(number=number, size=size, **which)
    if part is None:
        return None
    while True:
        records += part.records
        if part.next is None:
            return records
        part = log.read(part.serials, position=part.next, size=size, **which)
        assert part is not None


def size_on_disk(log: OutputLog) -> int:
    assert log.folder is not None
    return sum(path.stat().st_size for path in log.folder.iterdir())


def test_what_was_written_is_read_in_order(log: OutputLog) -> None:
    records = [(i % 3, 1 + i % 2, b"%d\n" % i) for i in range(500)]
    for record in records:
        assert log.write(1, 7, *record) is None
    assert read(log, 7) == records


@pytest.mark.parametrize("size", [1, 8, 100, 10**6])
def test_parts_of_any_size_join_to_the_whole(log: OutputLog, size: int) -> None:
    records = [(0, 1, b"x" * (i * 37 % 5000)) for i in range(20)]
    for record in records:
        log.write(1, 7, *record)
    assert read(log, 7, size) == records


def test_a_record_larger_than_a_part_is_read_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    log = OutputLog()
    records = [(0, 1, b"x" * 3_000_000), (0, 1, b"y")]
    for record in records:
        log.write(1, 7, *record)
    assert read(log, 7) == records
    log.close()


def test_the_newest_cell_that_printed_is_read_by_default(log: OutputLog) -> None:
    log.write(1, 11, 0, 1, b"one")
    log.write(2, 12, 0, 1, b"two")
    log.write(1, 11, 0, 1, b"one goes on")
    assert read(log) == [(0, 1, b"two")]


def test_everything_that_ran_under_one_number_is_one_log(log: OutputLog) -> None:
    for serial in (1, 2, 3):
        log.write(serial, 5, 0, 1, b"%d" % serial)
    assert read(log, 5) == [(0, 1, b"1"), (0, 1, b"2"), (0, 1, b"3")]


def test_of_what_ran_under_one_number_each_can_be_read_alone(log: OutputLog) -> None:
    for serial in (1, 2, 3):
        log.write(serial, 5, 0, 1, b"%d" % serial)
    assert read(log, serials=[2]) == [(0, 1, b"2")]


def test_outside_of_a_notebook_the_newest_is_read_alone(log: OutputLog) -> None:
    for serial in (1, 2):
        log.write(serial, 0, 0, 1, b"%d" % serial)
    assert read(log) == [(0, 1, b"2")]


def test_a_cell_that_printed_nothing_is_not_there(log: OutputLog) -> None:
    assert read(log, 7) is None
    assert read(log) is None


def test_a_cell_that_goes_on_in_the_background_is_kept_whole(log: OutputLog) -> None:
    log.write(1, 1, 0, 1, b"a")
    log.write(2, 2, 1, 1, b"other")
    log.write(1, 1, 0, 1, b"b")
    assert read(log, 1) == [(0, 1, b"a"), (0, 1, b"b")]
    assert read(log, 2) == [(1, 1, b"other")]


def test_ranks_are_chosen(log: OutputLog) -> None:
    for rank in range(4):
        log.write(1, 1, rank, 1, b"%d" % rank)
    assert read(log, 1, ranks=[1, 3]) == [(1, 1, b"1"), (3, 1, b"3")]


def test_old_cells_make_room(log: OutputLog) -> None:
    for serial in range(1, 11):
        for _ in range(10):
            assert log.write(serial, serial, 0, 1, b"x" * 2000) is None
        assert size_on_disk(log) <= 64_000
    assert read(log, 1) is None
    assert read(log, 10) == [(0, 1, b"x" * 2000)] * 10


def test_any_number_of_cells_takes_a_bounded_number_of_files(log: OutputLog) -> None:
    for serial in range(1, 5000):
        log.write(serial, serial, 0, 1, b"short\n")
    assert log.folder is not None and len(list(log.folder.iterdir())) <= 17
    assert read(log, 4999) == [(0, 1, b"short\n")]
    assert read(log, 1) is None


def test_of_a_cell_without_end_the_newest_part_is_kept_and_that_is_said_once(log: OutputLog) -> None:
    notices = [log.write(1, 1, 0, 1, b"%06d" % i * 100) for i in range(1000)]
    assert size_on_disk(log) <= 64_000
    said = [notice for notice in notices if notice]
    assert len(said) == 1 and "newest" in said[0]
    records = read(log, 1)
    assert records is not None
    assert records == [(0, 1, b"%06d" % i * 100) for i in range(1000 - len(records), 1000)]
    assert len(records) * 600 > 50_000


def test_a_part_says_how_much_has_made_room(log: OutputLog) -> None:
    for _ in range(1000):
        log.write(1, 1, 0, 1, b"x" * 600)
    part = log.read(number=1)
    assert part is not None and part.dropped > 0
    assert part.dropped + part.size == 600_000 and part.missing == 0


def test_the_cell_after_one_without_end_is_logged(log: OutputLog) -> None:
    for _ in range(200):
        log.write(1, 1, 0, 1, b"x" * 1000)
    assert log.write(2, 2, 0, 1, b"next") is None
    assert read(log, 2) == [(0, 1, b"next")]


def test_reading_goes_on_when_what_comes_next_has_made_room_meanwhile(log: OutputLog) -> None:
    log.write(1, 1, 0, 1, b"0000" * 500)
    part = log.read(number=1, size=1)
    for i in range(1, 100):
        log.write(1, 1, 0, 1, b"%04d" % i * 500)
    assert part is not None and part.next is None  # it was all that there was
    part = log.read(part.serials, position=1, size=1)
    assert part is not None and part.records[0][2][:4].isdigit() and part.next is not None


def test_on_a_full_disk_it_is_said_once_and_what_was_written_stays_readable(log: OutputLog) -> None:
    log.write(1, 1, 0, 1, b"before")
    with files_of_at_most(1000):
        notices = [log.write(1, 1, 0, 1, b"x" * 700) for _ in range(5)]
    said = [notice for notice in notices if notice]
    assert len(said) == 1 and os.strerror(errno.EFBIG) in said[0] and "TMPDIR" in said[0]
    assert read(log, 1) == [(0, 1, b"before"), (0, 1, b"x" * 700)]


def test_a_part_says_how_much_a_full_disk_has_cost(log: OutputLog) -> None:
    with files_of_at_most(1000):
        for _ in range(5):
            log.write(1, 1, 0, 1, b"x" * 700)
    part = log.read(number=1)
    assert part is not None and (part.size, part.missing, part.dropped) == (700, 4 * 700, 0)


def test_the_next_cell_is_logged_once_there_is_space_again(log: OutputLog) -> None:
    with files_of_at_most(10):
        assert log.write(1, 1, 0, 1, b"x" * 100)
    assert log.write(2, 2, 0, 1, b"after") is None
    assert read(log, 2) == [(0, 1, b"after")]


def test_without_any_temporary_folder_cells_run_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> str:
        raise FileNotFoundError(errno.ENOENT, "No usable temporary directory found")

    monkeypatch.setattr("tempfile.gettempdir", fail)
    log = OutputLog()
    assert "Free some space" in (log.write(1, 1, 0, 1, b"x") or "")
    assert log.write(1, 1, 0, 1, b"x") is None
    log.close()


def test_files_that_somebody_has_deleted_are_not_there(log: OutputLog) -> None:
    log.write(1, 1, 0, 1, b"x")
    assert log.folder is not None
    next(log.folder.iterdir()).unlink()
    assert read(log, 1) is None


def test_a_folder_that_somebody_has_deleted_is_made_again_for_the_next_cell(log: OutputLog) -> None:
    log.write(1, 1, 0, 1, b"x")
    assert log.folder is not None
    shutil.rmtree(log.folder)
    log.write(2, 2, 0, 1, b"y")
    assert read(log, 2) == [(0, 1, b"y")]


def test_nothing_is_left_of_a_session_that_has_ended(log: OutputLog) -> None:
    for serial in range(1, 20):
        log.write(serial, serial, 0, 1, b"x" * 1000)
    log.clear()
    assert size_on_disk(log) == 0 and read(log) is None
    log.write(20, 20, 0, 1, b"new")
    assert read(log) == [(0, 1, b"new")]


def test_a_cell_that_printed_long_ago_is_forgotten_before_the_index_grows(
    log: OutputLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nbdist.controller.base.outputlog.CELLS", 10)
    for serial in range(1, 20):
        log.write(serial, serial, 0, 1, b"%d" % serial)
    assert read(log, 9) is None
    assert [read(log, number) for number in (10, 19)] == [[(0, 1, b"10")], [(0, 1, b"19")]]


def test_only_the_user_can_read_it(log: OutputLog) -> None:
    log.write(1, 1, 0, 1, b"x")
    assert log.folder is not None
    assert log.folder.stat().st_mode & 0o777 == 0o700
    assert next(log.folder.iterdir()).stat().st_mode & 0o777 == 0o600


def test_a_cell_costs_the_same_however_many_there_were(log: OutputLog) -> None:
    def cost(first: int) -> float:
        began = time.process_time()
        for serial in range(first, first + 1000):
            log.write(serial, serial, 0, 1, b"x")
        return time.process_time() - began

    few = cost(1)
    for serial in range(1001, 20_000):
        log.write(serial, serial, 0, 1, b"x")
    assert cost(20_000) < 10 * few + 0.1


@pytest.mark.parametrize("size", [1, 999, 30_000, 1_000_000])
def test_the_end_of_what_a_cell_has_printed_is_found_among_the_output_of_others(log: OutputLog, size: int) -> None:
    for number in range(300):
        log.write(1 + number % 2, 7, number % 3, 1, b"%099d\n" % number)
    tail = log.tail(2, size)
    assert tail.printed == 100 * 150
    wanted = min(50, -(-size // 300))
    for rank in range(3):
        kept = [b"%099d\n" % number for number in range(1, 300, 2) if number % 3 == rank]
        found = [data for each, _, data in tail.records if each == rank]
        assert found == kept[-len(found) :] and wanted - 1 <= len(found) <= wanted + 10
    assert log.tail(3, size).records == []


def test_of_a_line_that_rewrites_itself_the_end_is_kept_too(log: OutputLog) -> None:
    for step in range(1_000):
        log.write(1, 1, 0, 2, b"\r%5d of 1000" % step)
    assert b"".join(data for *_, data in log.tail(1, 100).records).endswith(b"\r  999 of 1000")


def test_who_follows_gets_what_all_cells_print_from_then_on(log: OutputLog) -> None:
    log.write(1, 1, 0, 1, b"before")
    position = log.follow(-1).position
    assert log.follow(position).records == []
    log.write(1, 1, 0, 1, b"first")
    log.write(2, 2, 1, 2, b"second")
    new = log.follow(position)
    assert new.records == [(1, 0, 1, b"first"), (2, 1, 2, b"second")] and new.whole and not new.dropped
    assert log.follow(new.position).records == []


def test_who_follows_too_slowly_gets_the_rest_and_how_much_is_missing(log: OutputLog) -> None:
    position = log.follow(-1).position
    for number in range(100):
        log.write(1, 1, 0, 1, b"%04d" % number * 250)
    numbers, dropped, whole = [], 0, False
    while not whole:
        new = log.follow(position)
        position, whole, dropped = new.position, new.whole, dropped + new.dropped
        numbers += [int(data[:4]) for *_, data in new.records]
    assert 50 < len(numbers) < 100 and numbers == list(range(100 - len(numbers), 100))
    assert dropped == (100 - len(numbers)) * (1000 + 15)


def test_the_end_of_a_cell_has_that_of_each_rank(log: OutputLog) -> None:
    """Also of one that ended long before the others, or wrote its only line at the beginning."""
    log.write(1, 1, 2, 1, b"all that rank 2 says\n")
    for step in range(100):
        log.write(1, 1, 1, 1, b"rank 1, step %d\n" % step)
    log.write(1, 1, 1, 1, b"rank 1 is done\n")
    for step in range(1_000):
        log.write(1, 1, 0, 1, b"rank 0, step %d\n" % step)
    records = log.tail(1, 1_000).records
    of = {rank: b"".join(data for each, _, data in records if each == rank) for rank in range(3)}
    assert of[2] == b"all that rank 2 says\n"
    assert of[1].startswith(b"rank 1, step") and of[1].endswith(b"rank 1, step 99\nrank 1 is done\n")
    assert of[0].startswith(b"rank 0, step") and of[0].endswith(b"rank 0, step 999\n") and len(of[0]) <= 1_020
    assert [rank for rank, *_ in records] == sorted((rank for rank, *_ in records), key=lambda rank: -rank)
