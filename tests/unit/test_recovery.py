from __future__ import annotations

from typing import Any

from nbdist.controller.recovery import Recovery, plan
from nbdist.protocol import InOrder, Recover


def state(entered: int = 3, *, cut: bool = False, members: tuple[int, ...] = (0, 1), **other: Any) -> dict[str, Any]:
    """What a rank answers that is in one group, "0"."""
    return {
        "groups": {"0": [list(members), [entered], cut]},
        "count": 1,
        "caught": False,
        "steps": 0,
        "stopped": None,
        **other,
    }


def recovery(*states: dict[str, Any], dead: tuple[int, ...] = (), lost: tuple[str, ...] = ()) -> tuple[Recovery, Any]:
    """A recovery whose ranks have answered, and what it told them."""
    told: list[Recover] = []
    idle = [rank for rank in range(len(states)) if rank not in dead]
    found = Recovery(5, range(len(states)), idle, dead, 1, lost, 100.0)
    found.begin(lambda ranks, question, arguments: None, lambda ranks, message: told.append(message))
    for rank in idle:
        found.answered(rank, states[rank], 100.001)
    return found, told[0] if told else None


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
    assert plan({0: state(), 1: state(cut=True)}, dead=[]).renew == ["0"]


def test_a_group_with_a_member_that_is_busy_is_left_alone() -> None:
    assert not plan({0: state(4, members=(0, 1, 2)), 1: state(3, members=(0, 1, 2))}, dead=[]).needed


def test_a_group_with_a_dead_member_is_lost_once() -> None:
    states = {0: state(members=(0, 1))}
    assert plan(states, dead=[1]).lost == ["0"]
    assert not plan(states, dead=[1], known_lost=["0"]).needed


def test_a_group_that_a_member_does_not_have_is_stale() -> None:
    assert plan({0: state(), 1: {**state(), "groups": {}}}, dead=[]).stale == ["0"]


def test_ranks_that_have_numbered_groups_differently_are_evened_up() -> None:
    found = plan({0: state(), 1: state(count=3)}, dead=[])
    assert found.needed and found.count == 3 and not found.renew


def test_models_are_reset_on_all_ranks_when_one_was_caught_in_a_step() -> None:
    _, told = recovery(state(), state(caught=True))
    assert told.reset and not told.renew and told.generation == 1


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


def test_a_renewal_that_fails_says_why() -> None:
    found, _ = recovery(state(4), state(3))
    found.in_order(0, InOrder("RuntimeError: no store"))
    found.in_order(1, InOrder())
    assert "could not be renewed (RuntimeError: no store): `%distributed restart`" in found.text
