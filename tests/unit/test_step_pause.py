"""Where a process stands still between two steps: what its visitor may do there, and that it always goes on."""

from __future__ import annotations

import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from nbdist.serving.control_messages import (
    CodeRan,
    Controlled,
    ControlRefused,
    GoOn,
    PauseAfter,
    Report,
    RunCode,
    StandsStill,
    StepPassed,
    TakeControl,
    WentOn,
)
from nbdist.serving.look_messages import receive, send
from nbdist.serving.step_pause import NEVER, StepPause
from testbed.kernel import wait_until


class Training:
    """Makes steps one after another, when told to."""

    def __init__(self) -> None:
        self.steps = 0
        self.pause = StepPause(lambda: (self.steps, 0.0))
        self.pause.allowed = True

    def step(self, count: int = 1) -> None:
        for _ in range(count):
            self.steps += 1
            if self.steps >= self.pause.target:
                self.pause.reached(self.steps, sys._getframe())

    @contextmanager
    def makes(self, count: int) -> Iterator[None]:
        """So many steps in a thread of its own, which has to come to its end."""
        thread = threading.Thread(target=self.step, args=(count,))
        thread.start()
        yield
        thread.join(20)
        assert not thread.is_alive()


class Visitor:
    def __init__(self, training: Training, limit: float = 60.0) -> None:
        self.connection, theirs = socket.socketpair()
        self.connection.settimeout(20)
        request = TakeControl(limit, 7)
        self.thread = threading.Thread(target=training.pause.attend, args=(theirs, request))
        self.thread.start()
        self.granted = self.hears()

    def asks(self, order: PauseAfter | RunCode | GoOn) -> Report:
        send(self.connection, order)
        return self.hears()

    def hears(self) -> Report:
        report: Report = receive(self.connection, Report)
        return report

    def goes(self) -> None:
        self.connection.close()
        self.thread.join(20)
        assert not self.thread.is_alive()


@pytest.fixture
def training() -> Training:
    return Training()


def test_it_stands_still_after_the_step_and_goes_on(training: Training) -> None:
    visitor = Visitor(training)
    assert visitor.granted == Controlled(0, 0.0)
    send(visitor.connection, PauseAfter(2))
    wait_for_target(training, 2)
    with training.makes(3):
        assert visitor.hears() == StandsStill(2) and training.steps == 2
        assert visitor.asks(RunCode("1 + 1")) == CodeRan([("stdout", "2"), ("stdout", "\n")])
        went_on = visitor.asks(GoOn())
        assert isinstance(went_on, WentOn) and not went_on.limit
    assert training.steps == 3 and training.pause.target == NEVER
    visitor.goes()


def wait_for_target(training: Training, step: int) -> None:
    wait_until(lambda: training.pause.target == step, "the order")


def test_a_step_that_has_been_made_is_answered_with_how_many_there_are(training: Training) -> None:
    training.step(5)
    visitor = Visitor(training)
    assert visitor.asks(PauseAfter(5)) == StepPassed(5, 5)
    training.step()
    assert visitor.asks(PauseAfter(3)) == StepPassed(3, 6)
    visitor.goes()


def test_it_goes_on_to_a_later_step(training: Training) -> None:
    visitor = Visitor(training)
    send(visitor.connection, PauseAfter(1))
    wait_for_target(training, 1)
    with training.makes(3):
        assert visitor.hears() == StandsStill(1)
        assert visitor.asks(PauseAfter(3)) == StandsStill(3)
        visitor.goes()


def test_two_orders_for_later_steps_at_once_leave_nothing_behind(training: Training) -> None:
    visitor = Visitor(training)
    send(visitor.connection, PauseAfter(1))
    wait_for_target(training, 1)
    with training.makes(4):
        assert visitor.hears() == StandsStill(1)
        send(visitor.connection, PauseAfter(2))
        send(visitor.connection, PauseAfter(4))
        while visitor.hears() != StandsStill(4):
            pass
        assert isinstance(visitor.asks(RunCode("2")), CodeRan)
        visitor.goes()


@pytest.mark.parametrize("code", ["while True: pass", "import time\nwhile True: time.sleep(0.01)"])
def test_it_goes_on_when_its_visitor_is_gone_whatever_runs(training: Training, code: str) -> None:
    visitor = Visitor(training)
    send(visitor.connection, PauseAfter(1))
    wait_for_target(training, 1)
    with training.makes(2):
        visitor.hears()
        send(visitor.connection, RunCode(code))
        visitor.goes()
    second = Visitor(training)
    assert isinstance(second.granted, Controlled)
    second.goes()


def test_it_goes_on_when_its_time_is_over_and_another_may_come(training: Training) -> None:
    visitor = Visitor(training, limit=0.1)
    send(visitor.connection, PauseAfter(1))
    wait_for_target(training, 1)
    with training.makes(2):
        assert visitor.hears() == StandsStill(1)
        went_on = visitor.hears()
        assert isinstance(went_on, WentOn) and went_on.limit and went_on.seconds >= 0.1
    second = Visitor(training)
    assert isinstance(second.granted, Controlled)
    visitor.goes()
    third = Visitor(training)
    assert third.granted == ControlRefused("taken", 7)
    third.goes()
    second.goes()


@pytest.mark.parametrize("limit", [1e300, float("inf"), -1.0, float("nan")])
def test_no_limit_ends_the_training(training: Training, limit: float) -> None:
    visitor = Visitor(training, limit)
    send(visitor.connection, PauseAfter(1))
    wait_for_target(training, 1)
    with training.makes(2):
        assert visitor.hears() == StandsStill(1)
        send(visitor.connection, GoOn())
        while not isinstance(visitor.hears(), WentOn):
            pass
    assert training.steps == 2
    visitor.goes()


def test_time_stood_still_at_earlier_steps_counts(training: Training) -> None:
    visitor = Visitor(training, limit=0.2)
    send(visitor.connection, PauseAfter(1))
    wait_for_target(training, 1)
    with training.makes(2):
        visitor.hears()
        visitor.asks(RunCode("import time\ntime.sleep(0.15)"))
        assert visitor.asks(PauseAfter(2)) == StandsStill(2)
        went_on = visitor.hears()
        assert isinstance(went_on, WentOn) and went_on.limit and went_on.seconds < 0.35
    visitor.goes()


def test_no_step_is_missed_by_an_order_that_comes_while_it_is_made(training: Training) -> None:
    """Whatever the order of the two, the step is answered with one report: passed, or stood still."""
    for _ in range(300):
        visitor = Visitor(training)
        step = training.steps + 25
        with training.makes(50):
            report = visitor.asks(PauseAfter(step))
            if report == StandsStill(step):
                assert training.steps == step
            else:
                assert isinstance(report, StepPassed) and report.steps >= step
            visitor.goes()


def test_nobody_may_who_is_not_allowed(training: Training) -> None:
    training.pause.allowed = False
    visitor = Visitor(training)
    assert visitor.granted == ControlRefused("forbidden")
    visitor.goes()


def test_the_order_to_go_on_ends_the_wait_for_a_step_that_has_not_come(training: Training) -> None:
    visitor = Visitor(training)
    send(visitor.connection, PauseAfter(9))
    assert visitor.asks(GoOn()) == WentOn(0.0, False)
    training.step(10)
    visitor.goes()


def test_a_traced_call_goes_on_after_code_has_run(training: Training) -> None:
    visitor = Visitor(training)
    send(visitor.connection, PauseAfter(1))
    wait_for_target(training, 1)
    with training.makes(1):
        visitor.hears()
        visitor.asks(RunCode("1"))
        visitor.asks(GoOn())
    visitor.goes()

    def call() -> None:
        sys.settrace(lambda *_: None)
        threading.Event()
        sys.settrace(None)

    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(20)
    assert not thread.is_alive()
