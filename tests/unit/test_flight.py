"""The last collectives of ranks side by side: what is aligned, what counts as a difference, what is left out."""

from __future__ import annotations

from nbdist.client.reports.flight import render
from nbdist.wire.questions.stopping import Collective, Flight


def call(sequence: int, name: str = "all_reduce", tensors: str = "float32[4]", *, ended: bool = True) -> Collective:
    return Collective("1", "group dp", sequence, name, tensors, ended)


def flight(*calls: Collective, groups: tuple[str, ...] = ("0", "1")) -> Flight:
    return Flight(list(calls), list(groups), recorded=True)


def rows(flights: dict[int, Flight], count: int = 20) -> list[list[str]]:
    """The table without its header, words joined by one space."""
    return [line.split() for line in render(flights, count).splitlines()[1:]]


def test_ranks_with_equal_records_share_a_column_and_nothing_is_marked() -> None:
    told = render({0: flight(call(7), call(8)), 1: flight(call(7), call(8))})
    assert told.splitlines()[0].split() == ["group", "#", "ranks", "0-1"]
    assert "first difference" not in told and "not yet" not in told


def test_the_first_difference_is_marked_and_no_later_one() -> None:
    flights = {0: flight(call(7), call(8), call(9)), 1: flight(call(7), call(8, "broadcast"), call(9, "broadcast"))}
    marked = [row for row in rows(flights) if "first" in row]
    assert [row[:2] for row in marked] == [["dp", "8"]]


def test_different_tensors_differ_where_all_ranks_pass_the_same() -> None:
    assert "first difference" in render({0: flight(call(1)), 1: flight(call(1, tensors="float32[8]"))})
    uneven = {rank: flight(call(1, "alltoall_base", f"float32[{rank}]")) for rank in (0, 1)}
    assert "first difference" not in render(uneven)


def test_a_rank_that_lacks_a_collective_of_its_group_is_named() -> None:
    flights = {0: flight(call(1), call(2, ended=False)), 1: flight(call(1)), 2: flight(groups=("0",))}
    told = render(flights)
    assert "<- not yet on rank 1" in told and told.endswith("…: has not ended")


def test_what_was_before_a_group_was_rebuilt_is_left_out() -> None:
    flights = {0: flight(call(41), call(42), call(1)), 1: flight(call(42, "broadcast"), call(1))}
    assert [row[:2] for row in rows(flights)] == [["dp", "1"]]


def test_a_difference_before_the_last_is_shown_with_what_led_to_it() -> None:
    first = [call(number) for number in range(1, 61)]
    second = [call(number, "broadcast" if number == 10 else "all_reduce") for number in range(1, 61)]
    numbers = [row[1] for row in rows({0: flight(*first), 1: flight(*second)}, count=5)]
    assert numbers == ["7", "8", "9", "10", "11"]
