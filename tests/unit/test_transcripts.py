"""What cells have printed, page by page, from a real output log."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from nbdist.base.ranks import ONE_NODE
from nbdist.controller.base.outputlog import OutputLog
from nbdist.errands.transcripts import PAGE, Transcript, Transcripts, page_of, plain, without_middle
from nbdist.wire.messages.output import STDERR, STDOUT, LogPart


@pytest.fixture
def log() -> Iterator[OutputLog]:
    made = OutputLog()
    yield made
    made.close()


def transcript(log: OutputLog, ranks: list[int], *, size: int = 1 << 20) -> Transcript:
    def read(*, cell: int, **question: Any) -> LogPart:
        part = log.read(number=cell, size=size, **question)
        return LogPart(0, **(vars(part) if part is not None else {}))

    return Transcript(read, 7, ranks, ONE_NODE)


def say(log: OutputLog, rank: int, text: str, stream: int = STDOUT, serial: int = 1) -> None:
    assert log.write(serial, 7 if serial == 1 else 8, rank, stream, text.encode()) is None


def text_of(transcript: Transcript, since: int = 0, *, over: bool = False) -> str:
    return transcript.page(since, over=over)[0].text


def test_a_cell_that_has_printed_nothing_has_an_empty_page(log: OutputLog) -> None:
    found = transcript(log, [0, 1])
    assert found.page(0, over=False) == (page_of(""), "")
    assert found.page(5, over=True)[0].next == 0


def test_equal_lines_of_ranks_are_there_once(log: OutputLog) -> None:
    for rank in (0, 1):
        say(log, rank, f"same\nof {rank}\n")
        say(log, rank, "of another cell\n", serial=2)
    assert text_of(transcript(log, [0, 1])) == "[0-1] same\n[0] of 0\n[1] of 1\n"


def test_positions_stay_valid_while_it_grows(log: OutputLog) -> None:
    found = transcript(log, [0, 1])
    say(log, 0, "one\n")
    first, _ = found.page(0, over=False)
    assert first.text == "[0] one\n" and first.left == 0
    say(log, 1, "two\nthr")
    second, _ = found.page(first.next, over=False)
    assert second.text.startswith("[1] two\n")
    say(log, 1, "ee\n")
    say(log, 0, "err\n", STDERR)
    third, _ = found.page(second.next, over=True)
    assert first.text + second.text + third.text == text_of(found, over=True)
    assert "".join(text_of(found, over=True).splitlines()) == "[0] one[1] two[1] three[0] err"


def test_lines_of_ranks_that_are_far_apart_in_a_finished_log_are_merged(log: OutputLog) -> None:
    lines = [f"line {i}\n" for i in range(1_000)]
    for rank in (0, 1):
        for line in lines:
            say(log, rank, line)
    found, pieces, since = transcript(log, [0, 1], size=500), [], 0
    while True:
        page, _ = found.page(since, over=True)
        pieces.append(page.text)
        since = page.next
        if not page.left:
            break
    assert "".join(pieces) == "".join(f"[0-1] {line}" for line in lines)
    assert max(map(len, pieces)) == PAGE
    assert text_of(found, -1, over=True) == "".join(pieces)[-PAGE:]


def test_bytes_of_a_character_may_come_apart(log: OutputLog) -> None:
    data = "ü\n".encode()
    for part in (data[:1], data[1:]):
        log.write(1, 7, 0, STDOUT, part)
    assert text_of(transcript(log, [0]), over=True) == "[0] ü\n"


def test_what_the_log_has_lost_is_said() -> None:
    log = OutputLog(limit=16_000)
    try:
        for i in range(2_000):
            log.write(1, 7, 0, STDOUT, f"line {i:05}\n".encode())
        page, note = transcript(log, [0]).page(0, over=True)
        assert "have made room for newer output" in note and page.text.startswith("[0] line 01")
    finally:
        log.close()


def test_the_transcripts_that_were_read_last_are_kept() -> None:
    kept = Transcripts(lambda **question: LogPart(0))
    first = kept.of(1, [0], ONE_NODE)
    assert kept.of(1, [0], ONE_NODE) is first and kept.of(1, [0, 1], ONE_NODE) is not first
    for cell in range(2, 40):
        kept.of(cell, [0], ONE_NODE)
    assert kept.of(1, [0], ONE_NODE) is not first


def test_texts_are_plain_and_fit_into_a_page() -> None:
    assert plain("\x1b[31mred\x1b[0m\r\nx\r 1/3\r 2/3\n") == "red\nx\n1/3\n2/3\n"
    assert without_middle("short") == "short"
    long = without_middle("a" * 20_000 + "b", 100)
    assert long.startswith("a" * 50) and long.endswith("b") and "characters left out" in long
    assert page_of("x" * 20_000, -1).next == 20_000 and page_of("x" * 20_000, 8_000).left == 4_000
