"""Which ranks a rank waits for, whatever the others have said."""

from __future__ import annotations

import itertools
from typing import Any

from nbdist.controller.cells.awaited_ranks import AwaitedRanks
from nbdist.wire.base.rank_spans import RankSpans
from nbdist.wire.questions.stopping import GroupState, Position

WORLD = RankSpans.of(range(4))
FIRST_HALF = RankSpans.of([0, 1])


def look(collective: str = "all_reduce", members: RankSpans | None = WORLD, entered: int = 1, **more: Any) -> Position:
    group = {WORLD: "0", FIRST_HALF: "1"}.get(members or WORLD, "")
    groups = {"0": GroupState(WORLD, [entered], cut=False)}
    return Position(1, 0.0, collective=collective, members=members, group=group, groups=groups, **more)


def waits(*looks: Position) -> list[set[int]]:
    """For whom each rank waits."""
    compared = AwaitedRanks(dict(enumerate(looks)), range(4))
    return [set(compared.of(rank)) for rank in range(4)]


def test_ranks_that_wait_for_the_same_wait_for_those_that_are_elsewhere() -> None:
    assert waits(look(), look(), look(""), look()) == [{2}, {2}, set(), {2}]


def test_nobody_waits_in_a_collective_that_all_are_in() -> None:
    assert waits(*[look()] * 4) == [set()] * 4


def test_only_members_of_the_group_are_waited_for() -> None:
    half = look(members=FIRST_HALF)
    assert waits(half, look(""), look(""), look("")) == [{1}, set(), set(), set()]


def test_ranks_with_different_tensors_wait_for_each_other() -> None:
    short, long = look(tensors="float32[8]"), look(tensors="float32[16]")
    assert waits(short, short, long, long) == [{2, 3}, {2, 3}, {0, 1}, {0, 1}]


def test_a_receiver_waits_for_a_sender_that_does_not_send() -> None:
    receiver = look("recv", RankSpans.of([1]))
    assert waits(receiver, look(""), look(""), look(""))[0] == {1}
    assert waits(receiver, look("send", RankSpans.of([0])), look(""), look(""))[0] == set()


def test_where_the_group_is_unknown_those_that_are_behind_are_waited_for() -> None:
    ahead, behind = look(members=RankSpans(), entered=2), look(members=RankSpans())
    assert waits(ahead, ahead, behind, behind) == [{2, 3}, {2, 3}, set(), set()]


def test_nobody_waits_for_itself() -> None:
    kinds = [
        look(collective, members, sequence=sequence)
        for collective in ("", "all_reduce")
        for members in (WORLD, FIRST_HALF, None)
        for sequence in (0, 1)
    ]
    for looks in itertools.combinations_with_replacement(kinds, 4):
        assert not any(rank in whom for rank, whom in enumerate(waits(*looks)))
