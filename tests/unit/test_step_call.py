"""A call that all ranks of a cell make after the same step: where it happens, and when it does not."""

from __future__ import annotations

import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
from torch.optim import SGD, Optimizer

from nbdist.metrics.events.step_events import of_this_thread
from nbdist.wire.questions.gathering import AtStep, Called
from nbdist.wire.questions.question import NoAnswer
from nbdist.worker.cell.interrupts import StepStop
from nbdist.worker.recovery.step_call import StepCall
from nbdist.worker.recovery.step_stop import StepCounter
from tests.support.stepping import CELL, ask, parameter

pytestmark = pytest.mark.torch_private

Answers = list[AtStep | Called | NoAnswer]


def train(counter: StepCounter, steps: int = 4) -> list[str]:
    """Returns what the loop has seen, in its order."""
    optimizer = SGD([parameter()])
    seen = []
    for number in range(1, steps + 1):
        optimizer.step()
        seen.append(f"body {number}")
    return seen


def gather(counter: StepCounter, target: int, patience: float = 0.0) -> tuple[StepCall, Answers]:
    answers: Answers = []
    call = StepCall(patience, answers.append)
    counter.gather(CELL)
    counter.arrive(CELL, target, call)
    return call, answers


def returns(value: bytes, log: list[int], counter: StepCounter) -> Callable[[], Called]:
    def work() -> Called:
        log.append(counter.count)
        return Called(value)

    return work


def test_it_is_made_after_the_step_and_the_loop_goes_on(counter: StepCounter) -> None:
    call, answers = gather(counter, 2)
    made_at: list[int] = []
    call.order(returns(b"value", made_at, counter), answers.append)
    assert train(counter) == ["body 1", "body 2", "body 3", "body 4"]
    assert made_at == [2]
    assert answers == [AtStep(), Called(b"value")]
    assert counter.stopped is None and sys.gettrace() is None


def test_what_the_function_raises_is_the_answer_and_the_loop_goes_on(counter: StepCounter) -> None:
    call, answers = gather(counter, 1)

    def fail() -> Called:
        raise ValueError("no room")

    call.order(fail, answers.append)
    assert len(train(counter)) == 4
    assert answers == [AtStep(), NoAnswer("ValueError: no room")]


def test_a_rank_that_nobody_calls_goes_on_and_refuses_what_comes_later(counter: StepCounter) -> None:
    call, answers = gather(counter, 1, patience=0.01)
    assert len(train(counter)) == 4
    call.order(returns(b"", [], counter), answers.append)
    assert answers == [AtStep(), NoAnswer("the rank no longer waits at the step")]


def test_a_cell_that_ends_before_the_step_says_so(counter: StepCounter) -> None:
    _, answers = gather(counter, 9)
    train(counter)
    counter.end(CELL)
    assert answers == [NoAnswer("the cell has ended")]


def test_a_stop_takes_its_place(counter: StepCounter) -> None:
    _, answers = gather(counter, 2)
    ask(counter, target=3)
    with pytest.raises(StepStop, match="after step 3"):
        train(counter)
    assert answers == [NoAnswer("the cell is being stopped")]


def test_a_rank_that_waits_for_the_call_hears_of_a_stop(counter: StepCounter, control: ThreadPoolExecutor) -> None:
    _, answers = gather(counter, 1, patience=60.0)

    def stop() -> None:
        control.submit(ask, counter, 3)

    counter.after_step = stop
    with pytest.raises(StepStop, match="after step 3"):
        train(counter)
    assert len(answers) == 1


def test_a_stop_that_was_asked_for_is_not_replaced(counter: StepCounter) -> None:
    ask(counter, target=2)
    assert not counter.gather(CELL).running
    counter.call_off(CELL, "")
    with pytest.raises(StepStop, match="after step 2"):
        train(counter)


def test_one_that_is_called_off_while_the_rank_waits_for_the_step_lets_it_go_on(
    counter: StepCounter, control: ThreadPoolExecutor
) -> None:
    def gather_once(_: Optimizer) -> None:
        if counter.count == 1:
            counter.gather(CELL)

    def call_off() -> None:
        control.submit(counter.call_off, CELL, "")

    stop = of_this_thread().listen(after=gather_once)
    counter.after_step = call_off
    assert len(train(counter)) == 4
    stop()


def test_a_loop_body_that_does_not_end_is_not_interrupted_for_it(counter: StepCounter) -> None:
    _, answers = gather(counter, 1)
    SGD([parameter()]).step()
    assert counter.overdue() == 0.0
    assert counter.expire() is False
    assert answers == [NoAnswer("the loop does not come to its next turn")]


def test_an_interrupt_in_the_body_calls_it_off(counter: StepCounter) -> None:
    _, answers = gather(counter, 1)
    optimizer = SGD([parameter()])
    with pytest.raises(StepStop):
        for _ in range(3):
            optimizer.step()
            assert counter.finishing()
    assert answers == [NoAnswer("the cell was interrupted")]
