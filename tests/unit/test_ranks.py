"""How sets of ranks are read and written."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nbdist.base.ranks import ONE_NODE, RankNames, describe_ranks, format_ranks, parse_ranks


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("3", (3,)),
        ("0,2-3", (0, 2, 3)),
        ("all", (0, 1, 2, 3)),
        (" ALL ", (0, 1, 2, 3)),
        (" 0 ,\t2 - 3 ", (0, 2, 3)),
        ("3,0,0-1,1", (0, 1, 3)),
        ("2-2", (2,)),
        ("003", (3,)),
    ],
)
def test_ranks_and_ranges_are_read_once_each_and_in_order(text: str, expected: tuple[int, ...]) -> None:
    assert parse_ranks(text, 4) == expected


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("9", "rank 9 isn't in this session"),
        ("0-4", "rank 4 isn't in this session"),
        ("0-99999999999999", "rank 99999999999999 isn't in this session"),
        ("9" * 5000, "isn't in this session"),
        ("-1", "'-1' isn't a rank or a range of ranks"),
        ("0,x", "'x' isn't a rank or a range of ranks"),
        ("1.5", "'1.5' isn't a rank or a range of ranks"),
        ("0-1-2", "'0-1-2' isn't a rank or a range of ranks"),
        ("٣", "'٣' isn't a rank or a range of ranks"),
        ("all,0", "'all' isn't a rank or a range of ranks"),
        ("", "a rank is missing"),
        ("0,,2", "a rank is missing"),
        ("3-1", "'3-1' counts down: write 1-3"),
    ],
)
def test_what_is_no_set_of_ranks_is_refused_by_name(text: str, complaint: str) -> None:
    with pytest.raises(ValueError) as refused:
        parse_ranks(text, 4)
    assert complaint in str(refused.value)


def test_ranks_of_a_node_are_named_by_it() -> None:
    nodes = {"a": [0, 1], "b": [2, 3]}
    assert parse_ranks("@b", 4, nodes) == (2, 3)
    assert parse_ranks("0, @b", 4, nodes) == (0, 2, 3)


@pytest.mark.parametrize(
    ("nodes", "complaint"),
    [
        ({"a": [0, 1], "b": [2, 3]}, "'@c' is not a machine of this session: it has @a, @b"),
        ({}, "'@c' names a machine, and this session has only this one"),
    ],
)
def test_a_node_that_is_not_there_is_refused(nodes: dict[str, list[int]], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        parse_ranks("@c", 4, nodes)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("9", "rank 9 isn't in this session: it has ranks 0-3; for example -r 0,2-3"),
        ("0,", "a rank is missing in '0,': the session has ranks 0-3; for example -r 0,2-3"),
        ("0,x", "'x' isn't a rank or a range of ranks: the session has ranks 0-3; for example -r 0,2-3"),
    ],
)
def test_a_refusal_says_what_is_allowed_and_gives_an_example(text: str, complaint: str) -> None:
    with pytest.raises(ValueError) as refused:
        parse_ranks(text, 4)
    assert str(refused.value) == complaint


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 8, 1024])
def test_the_example_in_a_refusal_is_itself_allowed(world_size: int) -> None:
    with pytest.raises(ValueError) as refused:
        parse_ranks("nonsense", world_size)
    assert parse_ranks(str(refused.value).rpartition("-r ")[2], world_size)


@given(st.sets(st.integers(0, 99), min_size=1))
def test_what_is_written_is_read_as_the_same_ranks(ranks: set[int]) -> None:
    assert parse_ranks(format_ranks(ranks), 100) == tuple(sorted(ranks))


@pytest.mark.parametrize(
    ("ranks", "text"), [((2,), "2"), ((0, 1), "0-1"), ((3, 0, 2), "0,2-3"), ((5, 1, 3, 1), "1,3,5")]
)
def test_ranks_are_written_as_short_as_possible(ranks: tuple[int, ...], text: str) -> None:
    assert format_ranks(ranks) == text


@pytest.mark.parametrize(
    ("ranks", "text"),
    [((2,), "rank 2"), ((0, 2, 3), "ranks 0, 2-3"), ((0, 1), "ranks 0-1"), ((), "no ranks")],
)
def test_ranks_are_described_as_part_of_a_sentence(ranks: tuple[int, ...], text: str) -> None:
    assert describe_ranks(ranks) == text


NODES = RankNames({"node-a": [0, 1], "node-b": [2, 3]})


@pytest.mark.parametrize(
    ("ranks", "words"),
    [([3], "rank 3 (node-b)"), ([2, 3], "ranks 2-3 (node-b)"), ([1, 2], "ranks 1-2"), ([], "no ranks")],
)
def test_ranks_of_one_node_are_described_with_it(ranks: list[int], words: str) -> None:
    assert NODES.describe(ranks) == words


@pytest.mark.parametrize(
    ("ranks", "label"), [([2, 3], "[2-3] (node-b) "), ([3], "[3] "), ([0, 1, 2, 3], "[0-3] "), ([0, 2, 3], "[0,2-3] ")]
)
def test_a_label_names_a_node_if_it_is_all_of_its_ranks(ranks: list[int], label: str) -> None:
    assert NODES.label(ranks) == label


def test_with_one_node_none_is_named() -> None:
    assert ONE_NODE.label([0, 1]) == "[0-1] " and ONE_NODE.describe([1]) == "rank 1"
