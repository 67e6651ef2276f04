from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from msgspec.structs import replace

from nbdist.controller.cells.recovery import FailedCell, GroupRepairs, Recovery, compare_groups
from nbdist.wire.base.rank_spans import RankSpans
from nbdist.wire.messages.cells import InOrder, Recover
from nbdist.wire.questions.stopping import GroupState, RankState


def state(entered: int = 3, *, cut: bool = False, members: tuple[int, ...] = (0, 1), **other: Any) -> RankState:
    """What a rank answers that is in one group, "0"."""
    groups = {"0": GroupState(RankSpans.of(members), [entered], cut)}
    return replace(RankState(groups, count=1, current=True), **other)


def begun(idle: Sequence[int], cell: FailedCell, **options: Any) -> tuple[Recovery, list[Recover]]:
    """A recovery at 100 s that nobody has answered yet, and what it tells the ranks."""
    told: list[Recover] = []
    busy, dead, lost = (options.get(name, []) for name in ("busy", "dead", "lost"))
    found = Recovery(cell, idle, busy, dead, 1, lost, 100.0)
    found.begin(lambda ranks, question, handler=None: None, lambda ranks, message: told.append(message))
    return found, told


def recovery(*states: RankState, dead: tuple[int, ...] = (), lost: tuple[str, ...] = ()) -> tuple[Recovery, Any]:
    """A recovery whose ranks have answered, and what it told them."""
    idle = [rank for rank in range(len(states)) if rank not in dead]
    found, told = begun(idle, FailedCell(5, range(len(states)), {0}), dead=dead, lost=lost)
    for rank in idle:
        found.answered(rank, states[rank], 100.001)
    return found, told[0] if told else None


def compare(
    states: dict[int, RankState], dead: Sequence[int] = (), lost: Sequence[str] = (), **cell: Any
) -> GroupRepairs:
    return compare_groups(states, list(states), dead, lost, FailedCell(5, **cell))


def test_nothing_is_done_when_all_ranks_are_in_step() -> None:
    found, told = recovery(state(), state())
    assert (found.done, found.text, found.generation, told) == (True, "", 1, None)


def test_a_group_is_renewed_when_a_rank_has_entered_more_collectives() -> None:
    found, told = recovery(state(4), state(3))
    assert told.renew == ["0"] and told.generation == 2 and not found.done
    found.in_order(0, InOrder())
    found.in_order(1, InOrder(gradients=True))
    assert found.text == "process groups rebuilt (generation 2); gradients of the interrupted step dropped"


def test_a_group_whose_connections_were_cut_is_renewed() -> None:
    assert compare({0: state(), 1: state(cut=True)}).renew == ["0"]


ALL = (0, 1, 2)


@pytest.mark.parametrize(
    ("states", "ran"),
    [
        pytest.param({0: state(1, members=ALL), 1: state(1, members=ALL)}, [0, 1], id="the cell has entered it"),
        pytest.param({0: state(0, members=ALL), 1: state(0, members=ALL)}, ALL, id="the one missing ran the cell"),
        pytest.param({0: state(0, members=ALL, current=False)}, [0], id="the failed rank runs another cell since"),
        pytest.param({0: state(0, members=ALL, cut=True)}, [0], id="its connections were cut"),
    ],
)
def test_a_group_with_a_member_that_is_busy_or_late_is_owed(states: dict[int, RankState], ran: list[int]) -> None:
    found = compare(states, ranks=ran, failed={0})
    assert found.owed == {"0": RankSpans.of(ALL)} and not found.needed


def test_but_not_if_the_cell_left_it_alone_on_all_ranks_that_ran_it() -> None:
    assert not compare({0: state(0, members=ALL), 1: state(0, members=ALL)}, ranks=[0, 1], failed={0}).owed


def test_nor_if_the_cell_went_well_on_all_its_members() -> None:
    assert not compare({0: state(2, members=(0, 2))}, ranks=ALL, failed={1}).owed


def test_a_group_is_renewed_when_a_member_has_begun_another_cell_since() -> None:
    """What it had entered in the failed one is forgotten, so equal numbers say nothing."""
    states = {0: state(0), 1: state(0, current=False)}
    assert compare(states, ranks=[0, 1], failed={0}).renew == ["0"]
    assert compare(states, ranks=[0], failed={0}).renew == []


def test_who_does_not_answer_within_a_second_is_late_and_may_still_be_compared() -> None:
    found, told = begun([0, 1], FailedCell(5, [0, 1], {0}))
    found.answered(0, state(4), 100.1)
    found.tick(100.9)
    assert not found.late
    found.tick(101.1)
    assert found.late == found.awaited == {1} and found.open and not found.done
    found.answered(1, state(4), 103.0)
    assert found.done and found.text == "" and not told


def test_without_a_late_rank_its_groups_are_owed_and_that_is_said() -> None:
    found, _ = begun([0, 1], FailedCell(5, [0, 1], {0}))
    found.answered(0, state(4), 100.1)
    found.tick(101.1)
    found.go_on(101.2)
    assert found.done and found.late == {1} and found.owed == {"0": RankSpans.of([0, 1])}
    assert found.text == (
        "process groups shared with rank 1 may be out of step; "
        "they are rebuilt before the next cell that starts with rank 1 idle"
    )


def test_a_late_rank_that_has_nothing_to_do_with_the_failed_cell_is_not_waited_for() -> None:
    found, _ = begun([0, 1, 2], FailedCell(5, [0, 1], {0}))
    for rank in (0, 1):
        found.answered(rank, state(0, members=ALL), 100.1)
    found.tick(101.1)
    assert found.done and not found.late and not found.owed


def test_groups_of_a_rank_that_runs_another_cell_already_are_owed() -> None:
    found, told = begun([1], FailedCell(5, [0, 1], {0}), busy=[0])
    found.answered(1, state(3), 100.1)
    assert not found.done
    found.answered(0, state(0, current=False), 100.2)
    assert found.done and found.owed == {"0": RankSpans.of([0, 1])} and not told


def test_a_group_with_a_dead_member_is_lost_once() -> None:
    states = {0: state(members=(0, 1))}
    assert compare(states, dead=[1]).lost == ["0"]
    assert not compare(states, dead=[1], lost=["0"]).needed


def test_a_group_that_a_member_does_not_have_is_stale() -> None:
    assert compare({0: state(), 1: state(groups={})}).stale == ["0"]


def test_ranks_that_have_numbered_groups_differently_are_evened_up() -> None:
    found = compare({0: state(), 1: state(count=3)})
    assert found.needed and found.count == 3 and not found.renew


def test_models_are_reset_on_all_ranks_when_one_was_caught_in_a_step() -> None:
    _, told = recovery(state(), state(caught=True))
    assert told.reset and not told.renew and told.generation == 1


def test_ranks_that_stopped_after_the_same_step_are_in_step_however_many_messages_each_has_exchanged() -> None:
    assert compare({0: state(3, stopped=12), 1: state(7, stopped=12)}).renew == []
    assert compare({0: state(3, stopped=12), 1: state(7, stopped=13)}).renew == ["0"]
    assert compare({0: state(3, stopped=12), 1: state(7, stopped=12, cut=True)}).renew == ["0"]


def test_ranks_that_stopped_after_the_same_step_say_so() -> None:
    found, _ = recovery(state(steps=12, stopped=12), state(steps=12, stopped=12))
    assert found.step == 12 and found.text == ""


def test_ranks_a_step_apart_are_told_with_what_to_type() -> None:
    found, _ = recovery(state(steps=12), state(steps=13))
    assert "rank 1: 13; rank 0: 12" in found.text
    assert "nbdist.sync(model, optimizer, src=1)" in found.text


def test_a_rank_that_dies_meanwhile_is_not_waited_for() -> None:
    found, _ = recovery(state(4), state(3))
    found.in_order(0, InOrder())
    found.died(1, 100.1)
    assert found.done


def test_a_rank_that_does_not_come_is_told_with_what_to_type() -> None:
    found, _ = recovery(state(4), state(3))
    found.in_order(0, InOrder())
    found.tick(200.0)
    assert found.done and "rank 1" in found.text and "%distributed restart" in found.text
    assert found.missing == {1} and found.owed == {"0": RankSpans.of([0, 1])}


def test_a_renewal_that_fails_says_why() -> None:
    found, _ = recovery(state(4), state(3))
    found.in_order(0, InOrder("RuntimeError: no store"))
    found.in_order(1, InOrder())
    assert "could not be renewed (RuntimeError: no store): `%distributed restart`" in found.text
    assert found.owed == {"0": RankSpans.of([0, 1])} and not found.settled


def test_a_caught_error_resets_no_model_that_does_not_communicate_in_the_broken_group() -> None:
    broken = {0: state(cut=True), 1: state()}
    assert compare(broken).reset
    assert not compare(broken, caught=True).reset
    assert compare({0: state(cut=True, caught=True), 1: state()}, caught=True).reset
