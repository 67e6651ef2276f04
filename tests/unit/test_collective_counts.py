"""By their counts, ranks are told to have called the same collectives, or not."""

from __future__ import annotations

from nbdist.serving.collective_counts import is_ahead, more_entered


def test_what_was_entered_before_does_not_count() -> None:
    assert more_entered({"0": [7, 2], "1": [3]}, {"0": [5, 2], "2": [1]}) == {"0": [2, 0]}


def test_a_rank_that_waits_in_what_another_has_not_called_is_ahead() -> None:
    assert is_ahead({"0": [1]}, {"0": [0]})


def test_one_that_waits_in_what_others_have_done_their_part_of_is_not() -> None:
    assert not is_ahead({"0": [1]}, {"0": [1]})
    assert not is_ahead({"0": [1]}, {"0": [2]})


def test_groups_of_others_and_backends_that_do_not_count_decide_nothing() -> None:
    assert not is_ahead({"1": [1]}, {"0": [0]})
    assert not is_ahead({"0": []}, {"0": []})
