"""A log that is read part by part is the same as one that is read at once, whatever the parts."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nbdist.client.base import results
from nbdist.client.base.results import CellResult, RankResult
from nbdist.client.reports import logs
from nbdist.client.reports.logs import CellLog
from nbdist.errors import UsageError
from nbdist.wire.messages.output import STDERR, STDOUT, LogPart

Record = tuple[int, int, bytes]

texts = st.lists(st.sampled_from(["a", "é", "\n", "bc\n", "\r", "\u2028"]), max_size=6).map("".join)
records = st.lists(st.tuples(st.integers(0, 2), st.just(STDOUT), texts.map(str.encode)), max_size=12)


def log_of(kept: list[Record], part: int = 1, **gaps: int) -> CellLog:
    """A log whose controller gives so many records at once."""

    def ask(serials: list[int], ranks: list[int] | None, cell: int | None = None, position: int = 0) -> LogPart:
        given = [record for record in kept[position : position + part] if ranks is None or record[0] in ranks]
        following = position + part if position + part < len(kept) else None
        return LogPart(1, [7], 3, given, following, sum(len(data) for _, _, data in kept), **gaps)

    return CellLog(ask, 3)


def printed(kept: list[Record], rank: int) -> list[str]:
    text = b"".join(data for of, _, data in kept if of == rank).decode()
    return text.removesuffix("\n").split("\n") if text else []


@given(records, st.integers(1, 4))
def test_each_line_has_its_rank_in_front(kept: list[Record], part: int) -> None:
    whole = "".join(log_of(kept, part).lines([0, 1, 2]))
    assert whole == "".join(f"[{rank}] {line}\n" for rank in range(3) for line in printed(kept, rank))


@given(records, st.integers(1, 4), st.integers(1, 4))
def test_the_tail_is_the_last_lines_of_each_rank(kept: list[Record], part: int, tail: int) -> None:
    last = "".join(log_of(kept, part).lines([0, 1, 2], tail))
    assert last == "".join(f"[{rank}] {line}\n" for rank in range(3) for line in printed(kept, rank)[-tail:])


@given(records, st.integers(1, 4))
def test_a_search_finds_all_lines_of_a_rank_with_the_words(kept: list[Record], part: int) -> None:
    found, following = log_of(kept, part).search(1, "B")
    wanted = [line for line in printed(kept, 1) if "b" in line]
    assert (found, following) == ("".join(f"{line}\n" for line in wanted), None)


def test_a_search_that_finds_much_pauses_and_goes_on_where_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "SEARCH_CHARACTERS", 10)
    log = log_of([(0, STDOUT, b"some line\n")] * 5)
    first, following = log.search(0, "some")
    assert following is not None
    second, end = log.search(0, "some", following)
    assert (first + second, end) == ("some line\n" * 5, None)


def test_a_tail_is_read_from_where_it_begins() -> None:
    asked = []
    kept = [(0, STDOUT, b"line\n")] * 100

    def ask(position: int = 0, **_: Any) -> LogPart:
        asked.append(position)
        return LogPart(1, [7], 3, kept[position : position + 1], position + 1 if position < 99 else None)

    list(CellLog(ask, 3).lines([0], tail=3))
    assert asked[101:] == [96, 97, 98, 99]  # after all have been counted once


def test_a_character_that_is_cut_in_two_is_whole_again() -> None:
    kept = [(0, STDOUT, b"\xc3"), (0, STDERR, b"x"), (0, STDOUT, b"\xa9\n")]
    assert "".join(log_of(kept).lines([0])) == "[0] xé\n"


def test_what_the_log_lacks_is_told() -> None:
    assert log_of([]).explain_gaps() == ""
    text = log_of([], dropped=3 << 20, missing=5 << 10).explain_gaps()
    assert "the first 3.0 MiB" in text and "5.0 KiB more" in text and "cell 3" in text


def test_a_cell_that_the_log_does_not_know_is_refused() -> None:
    with pytest.raises(UsageError, match="cell 3 printed nothing"):
        CellLog(lambda **_: LogPart(1), 3)
    with pytest.raises(UsageError, match="this cell printed nothing"):
        CellLog(lambda **_: LogPart(1), CellResult([0], 7))
    with pytest.raises(UsageError, match="no cell has printed"):
        CellLog(lambda **_: LogPart(1))


# --- what results keep


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> RankResult:
    """The result of a rank that keeps 10 bytes."""
    monkeypatch.setattr(results, "KEPT", 10)
    return RankResult(0)


def test_up_to_its_limit_a_result_has_all_that_was_printed(small: RankResult) -> None:
    small.add(STDOUT, b"12345")
    small.add(STDERR, b"67890")
    assert (small.stdout, small.stderr, small.truncated) == ("12345", "67890", 0)


def test_above_it_the_oldest_goes_first_and_that_is_told_in_the_text(small: RankResult) -> None:
    small.add(STDOUT, b"1234\n5")
    small.add(STDERR, b"err")
    small.add(STDOUT, b"6\n789\n")
    assert small.truncated == 6 and small.stderr == "err"
    head, _, rest = small.stdout.partition("\n")
    assert "8 B of output above this line are not kept here" in head and rest == "789\n"


def test_of_displays_the_newest_are_kept_behind_one_that_tells_how_many_are_missing(small: RankResult) -> None:
    for number in range(5):
        small.show({"text/plain": str(number)}, 4)
    texts = [bundle["text/plain"] for bundle in small.outputs]
    assert "3 earlier displays are not kept here" in texts[0] and texts[1:] == ["3", "4"]


def test_a_single_display_is_kept_whatever_its_size(small: RankResult) -> None:
    small.show({"text/plain": "large"}, 1000)
    assert small.outputs == [{"text/plain": "large"}]
