"""Which copy of a training all ranks can go back to."""

from __future__ import annotations

from nbdist.train.checkpoint.neighbor_copies import newest_on_all

NEWCOMER: tuple[bool, list[int], list[int]] = (True, [], [])


def test_without_newcomers_it_is_the_newest_that_all_have() -> None:
    assert newest_on_all([(False, [10, 20], [10, 20]), (False, [10], [10]), (False, [10, 20], [10])]) == 10


def test_the_part_of_a_newcomer_is_the_one_on_the_rank_after_it() -> None:
    assert newest_on_all([(False, [10], [10]), NEWCOMER, (False, [10], [10])]) == 10
    assert newest_on_all([(False, [10], [10]), NEWCOMER, (False, [10], [5])]) is None


def test_the_last_rank_is_before_the_first() -> None:
    assert newest_on_all([(False, [10], [10]), (False, [10], []), NEWCOMER]) == 10


def test_of_two_newcomers_in_a_row_the_first_has_lost_its_copy() -> None:
    assert newest_on_all([(False, [10], [10]), NEWCOMER, NEWCOMER, (False, [10], [10])]) is None


def test_there_is_none_before_the_first() -> None:
    assert newest_on_all([(False, [], []), NEWCOMER]) is None
