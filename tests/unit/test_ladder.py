from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from nbdist.base import limits
from nbdist.base.limits import Slack
from nbdist.controller.cells.ladder import RAISE, Ladder
from nbdist.wire.questions.question import Question
from nbdist.wire.questions.stopping import StepsMade

TRAINING = StepsMade(count=7, stepping=False, running=True, age=0.1, median=0.05)
IDLE = StepsMade(count=0, stepping=False, running=True)


class Rungs:
    """Keeps what a ladder asks for."""

    def __init__(self, ranks: Sequence[int] = (0, 1), **options: Any) -> None:
        self.said: list[Any] = []
        self.lines: list[str] = []
        self.ladder = Ladder(5, ranks, self._ask, self._raise, self.lines.append, 100.0, **options)

    def _ask(self, ranks: Sequence[int], question: Question[Any], handler: Any = None) -> None:
        serial, *rest = msgspec.structs.astuple(question)
        assert serial == 5
        self.said.append((type(question).__name__.lower(), list(ranks), *rest))

    def _raise(self, ranks: Sequence[int]) -> None:
        self.said.append(("raise", list(ranks)))

    def arm(self, *answers: StepsMade, now: float = 100.01) -> None:
        for rank, answer in enumerate(answers):
            self.ladder.armed(rank, answer, now)

    def new(self) -> list[Any]:
        said, self.said = self.said, []
        return said


def test_ranks_that_train_stop_after_the_step_that_none_has_left_yet() -> None:
    rungs = Rungs()
    rungs.arm(TRAINING, replace(TRAINING, count=8))
    assert rungs.new() == [("arm", [0, 1]), ("aim", [0, 1], 9)]
    rungs.ladder.ended(0)
    rungs.ladder.ended(1)
    assert rungs.ladder.due is None


def test_a_cell_that_makes_no_steps_is_interrupted_at_once() -> None:
    rungs = Rungs()
    rungs.arm(IDLE, IDLE)
    assert rungs.new() == [("arm", [0, 1]), ("arm", [0, 1])]
    rungs.arm(IDLE, IDLE)
    assert rungs.new() == [("meet", [0, 1], 0)]


def test_a_cell_whose_last_step_is_long_ago_is_interrupted_at_once() -> None:
    rungs = Rungs()
    rungs.arm(TRAINING, replace(TRAINING, age=5.0))
    rungs.arm(TRAINING, replace(TRAINING, age=5.0))
    assert rungs.new()[-1] == ("meet", [0, 1], 7)


def test_slow_steps_are_waited_for_three_times_as_long_as_they_take() -> None:
    rungs = Rungs()
    rungs.arm(replace(TRAINING, median=10.0), replace(TRAINING, median=10.0))
    assert rungs.ladder.due == 130.01


def test_the_slowest_rank_decides_how_long_ranks_of_different_speed_run_on() -> None:
    rungs = Rungs([0, 1, 2])
    slow = replace(TRAINING, count=135, median=0.1)
    rungs.arm(replace(TRAINING, count=174), replace(TRAINING, count=174), slow)
    assert rungs.new()[-1] == ("aim", [0, 1, 2], 175)
    assert rungs.ladder.due == pytest.approx(100.01 + (1.5 * (175 - 135) + 2) * 0.1)
    assert rungs.lines == [
        "all ranks will stop after step 175: rank 2 has 40 steps to go, about 4 s. Interrupt again to stop now."
    ]
    for rank in (0, 1, 2):
        rungs.ladder.ended(rank)
    assert rungs.lines[1:] == ["rank 2 had 40 steps to go before all could stop"]


def test_but_nobody_waits_longer_than_ten_seconds_for_one_that_is_behind() -> None:
    rungs = Rungs()
    rungs.arm(replace(TRAINING, count=100), replace(TRAINING, count=2, median=0.1))
    assert rungs.ladder.due == 110.01


def test_one_that_would_not_be_there_in_time_is_not_waited_for_at_all() -> None:
    rungs = Rungs()
    rungs.arm(replace(TRAINING, count=1000), replace(TRAINING, count=2, median=0.1))
    assert rungs.new() == [("arm", [0, 1]), ("arm", [0, 1])]
    assert not rungs.lines


def test_ranks_that_keep_step_stop_without_a_line() -> None:
    rungs = Rungs()
    rungs.arm(replace(TRAINING, median=10.0), replace(TRAINING, median=10.0))
    assert not rungs.lines


def test_a_rank_that_does_not_say_how_many_steps_it_made_is_not_waited_for_long() -> None:
    rungs = Rungs()
    rungs.arm(TRAINING)
    rungs.ladder.tick(100.6)
    rungs.ladder.tick(101.2)
    assert rungs.new()[-1] == ("raise", [0, 1])


def test_who_does_not_get_to_the_step_is_interrupted_and_then_freed_within_three_seconds() -> None:
    rungs = Rungs()
    rungs.arm(TRAINING, TRAINING)
    rungs.ladder.ended(0)
    rungs.new()
    rungs.ladder.tick(102.02)
    assert rungs.new() == [("arm", [1])]
    rungs.ladder.armed(1, TRAINING, 102.03)
    assert rungs.new() == [("meet", [1], 7)]
    assert rungs.ladder.due is not None and rungs.ladder.due < 103.1
    rungs.ladder.tick(103.1)
    assert rungs.new() == [("cut", [1], False)]


def test_a_rank_that_is_behind_or_not_yet_at_the_end_of_its_step_is_not_interrupted_before_it() -> None:
    rungs = Rungs()
    rungs.ladder.force(100.1)
    rungs.arm(TRAINING, replace(TRAINING, stepping=True), now=100.11)
    assert rungs.new()[-1] == ("meet", [0, 1], 8)
    rungs.ladder.tick(100.2)
    assert rungs.new() == []
    rungs.ladder.ended(0)
    rungs.ladder.tick(100.32)
    assert rungs.new() == [("disarm", [1]), ("raise", [1]), ("cut", [1], True)]


def test_freeing_is_tried_again_until_the_rank_has_ended() -> None:
    rungs = Rungs(together=False)
    for now in (102.0, 102.5, 103.0):
        rungs.ladder.tick(now)
    assert rungs.new() == [("raise", [0, 1])] + 3 * [("cut", [0, 1], False)]
    rungs.ladder.ended(0)
    rungs.ladder.ended(1)
    rungs.ladder.tick(104.0)
    assert rungs.new() == []


def test_survivors_of_a_death_are_looked_at_twice_before_the_cell_gives_them_up() -> None:
    rungs = Rungs([1], together=False, grace=limits.SURVIVORS)
    dues = []
    for _ in range(3):
        due = rungs.ladder.due
        assert due is not None
        dues.append(due - 100)
        rungs.ladder.tick(due)
    assert rungs.new() == [("raise", [1])] + 3 * [("cut", [1], False)]
    assert dues[1] - dues[0] > limits.PROOF and dues[1] < limits.DEATH_GRACE < dues[2]


def test_force_frees_the_ranks_as_soon_as_they_have_had_time_to_finish_the_loops_body() -> None:
    rungs = Rungs()
    rungs.ladder.force(100.1)
    rungs.arm(TRAINING, TRAINING, now=100.11)
    rungs.ladder.tick(100.17)
    assert rungs.new()[2:] == [("meet", [0, 1], 7), ("disarm", [0, 1]), ("raise", [0, 1]), ("cut", [0, 1], True)]


def test_force_once_more_skips_every_wait() -> None:
    rungs = Rungs()
    rungs.ladder.force(100.1)
    rungs.ladder.force(100.11)
    assert rungs.new()[2:] == [("disarm", [0, 1]), ("raise", [0, 1]), ("cut", [0, 1], True)]


def test_some_of_a_cell_s_ranks_can_t_stop_at_a_step() -> None:
    assert Rungs([1], together=False).new() == [("raise", [1])]


def test_slow_answers_are_waited_for_but_a_stuck_rank_is_freed_as_soon_as_ever() -> None:
    rungs = Rungs(slack=Slack(answers=2.0))
    assert rungs.ladder.due == 100 + limits.ARM + 2
    rungs.arm(IDLE, IDLE)
    rungs.arm(IDLE, IDLE)
    assert rungs.ladder.rung == RAISE and rungs.ladder.due == 100 + limits.STUCK


def test_between_machines_all_takes_longer() -> None:
    rungs = Rungs(slack=Slack(travel=0.5, answers=0.5))
    assert rungs.ladder.due == 100 + limits.ARM + 0.5
    rungs.arm(IDLE, IDLE)
    rungs.arm(IDLE, IDLE)
    assert rungs.ladder.due == 100 + limits.STUCK + 0.5
