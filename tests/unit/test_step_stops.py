"""Where a cell is stopped: at the end of the loop's body, after the step that all ranks reach."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR

from nbdist.metrics.events.step_events import of_this_thread
from nbdist.worker.cell.interrupts import StepStop
from nbdist.worker.recovery.step_stop import StepCounter
from tests.support.stepping import CELL, LIMIT, MANY, Log, Step, ask, parameter

pytestmark = pytest.mark.torch_private


def for_loop(step: Step, log: Log) -> None:
    for _ in range(MANY):
        step()
        log.append("end")


def with_around_the_step(step: Step, log: Log) -> None:
    for _ in range(MANY):
        with contextlib.nullcontext():
            step()
        log.append("end")


def statement_of_several_lines(step: Step, log: Log) -> None:
    for _ in range(MANY):
        log.extend(
            ["end" if step() is None else ""],
        )


def try_around_the_step(step: Step, log: Log) -> None:
    for _ in range(MANY):
        try:
            step()
        except ValueError:
            pass
        finally:
            log.append("end")


def handled_error_before_the_step(step: Step, log: Log) -> None:
    for _ in range(MANY):
        with contextlib.suppress(ValueError):
            int("no number")
        try:
            int("no number")
        except ValueError as error:
            del error
        step()
        for _ in range(3):
            pass
        log.append("end")


def while_loop(step: Step, log: Log) -> None:
    batches = iter(range(MANY))
    try:
        while next(batches, None) is not None:
            step()
            log.append("end")
    finally:
        assert next(batches) == log.count("end"), "no batch is fetched in vain"


def endless_loop(step: Step, log: Log) -> None:
    while True:
        with contextlib.nullcontext():
            step()
        log.append("end")


def one_line(step: Step, log: Log) -> None:
    for _ in range(MANY): step(); log.append("end")  # fmt: skip # noqa: E701, E702


def comprehension(step: Step, log: Log) -> None:
    ended: Callable[[str], Any] = log.append
    _ = [(step(), ended("end")) for _ in range(MANY)]


def function_in_a_loop(step: Step, log: Log) -> None:
    def train_step() -> None:
        step()

    for _ in range(MANY):
        train_step()
        log.append("end")


def early_continue(step: Step, log: Log) -> None:
    for number in range(MANY):
        step()
        log.append("end")
        if number >= 0:
            continue
        log.append("never")


def break_out_of_the_inner_loop(step: Step, log: Log) -> None:
    for _ in range(MANY):
        for _ in range(MANY):
            step()
            break
        log.append("end")


def generator(step: Step, log: Log) -> None:
    def losses() -> Iterator[int]:
        for number in range(MANY):
            step()
            yield number
            log.append("end")

    for _ in losses():
        pass


def coroutine(step: Step, log: Log) -> None:
    async def train_step() -> None:
        step()
        await asyncio.sleep(0)

    async def train() -> None:
        for _ in range(MANY):
            await train_step()
            log.append("end")

    asyncio.run(train())


@pytest.mark.parametrize(
    "train",
    [
        for_loop,
        with_around_the_step,
        statement_of_several_lines,
        try_around_the_step,
        handled_error_before_the_step,
        while_loop,
        endless_loop,
        one_line,
        comprehension,
        function_in_a_loop,
        early_continue,
        break_out_of_the_inner_loop,
        generator,
        coroutine,
    ],
)
def test_the_cell_stops_at_the_end_of_the_loops_body(counter: StepCounter, train: Callable[[Step, Log], None]) -> None:
    ask(counter, target=3)
    log: Log = []
    with pytest.raises(StepStop, match=r"^stopped after step 3$"):
        train(SGD([parameter()]).step, log)
    assert counter.stopped == counter.count == 3
    assert log == ["end"] * 3
    assert sys.gettrace() is None


def test_a_scheduler_and_what_follows_agree_with_the_steps(counter: StepCounter) -> None:
    ask(counter, target=5)
    optimizer = AdamW([parameter()])
    scheduler = LambdaLR(optimizer, lambda epoch: 1.0)
    bodies = 0
    with pytest.raises(StepStop):
        for _ in range(MANY):
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            bodies += 1
    assert scheduler.last_epoch == bodies == 5


def test_a_body_with_several_steps_is_finished(counter: StepCounter) -> None:
    ask(counter, target=3)
    first, second = SGD([parameter()]), SGD([parameter()])
    with pytest.raises(StepStop, match="after step 4"):
        for _ in range(MANY):
            first.step()
            second.step()


def test_a_loop_that_is_not_pythons_stops_where_it_comes_by_again(counter: StepCounter) -> None:
    ask(counter, target=3)
    optimizer = SGD([parameter()])

    def train_step(_: int) -> None:
        optimizer.step()

    with pytest.raises(StepStop, match="after step 4"):
        list(map(train_step, range(MANY)))


def test_under_a_tracer_of_the_users_it_stops_in_the_step(counter: StepCounter) -> None:
    ask(counter, target=2)
    log: Log = []

    def tracer(*_: object) -> None: ...

    sys.settrace(tracer)
    try:
        with pytest.raises(StepStop):
            for_loop(SGD([parameter()]).step, log)
        assert sys.gettrace() is tracer
    finally:
        sys.settrace(None)
    assert counter.stopped == 2
    assert log == ["end"]


def test_a_cell_that_catches_the_stop_goes_on_and_is_not_stopped_again(counter: StepCounter) -> None:
    ask(counter, target=2)
    optimizer = SGD([parameter()])
    saved = 0
    for _ in range(10):
        try:
            for _ in range(3):
                optimizer.step()
        except KeyboardInterrupt:
            saved += 1
    assert saved == 1
    assert counter.count == 29
    assert counter.stopped is None


def test_a_stop_asked_for_before_the_cell_came_stays(counter: StepCounter) -> None:
    ask(counter, target=2, serial=CELL + 1)
    SGD([parameter()]).step()  # not the cell that was meant
    counter.end(CELL)
    counter.begin(CELL + 1)
    with pytest.raises(StepStop):
        for_loop(SGD([parameter()]).step, [])
    assert counter.stopped == 2


def test_a_stop_that_was_not_reached_ends_with_its_cell(counter: StepCounter) -> None:
    ask(counter, target=2)
    optimizer = SGD([parameter()])
    optimizer.step()
    optimizer.step()  # here it begins to wait for the end of a body that never comes
    counter.end(CELL)
    assert sys.gettrace() is None
    counter.begin(CELL + 1)
    for_loop_of_three(optimizer.step)
    assert counter.stopped is None


def for_loop_of_three(step: Step) -> None:
    for _ in range(3):
        step()


# --- waiting for the target


def test_an_armed_rank_waits_at_its_next_step_for_the_target(counter: StepCounter, control: ThreadPoolExecutor) -> None:
    asked, arrived = threading.Event(), threading.Event()
    optimizer = SGD([parameter()])

    def step() -> None:
        arrived.set()
        optimizer.step()

    def answer() -> int:
        count = counter.arm(CELL).count
        asked.set()
        assert arrived.wait(LIMIT)
        counter.aim(CELL, count + 2)
        return count

    counted = control.submit(answer)
    assert asked.wait(LIMIT)
    with pytest.raises(StepStop):
        for_loop(step, [])
    assert counter.stopped == counted.result() + 2 == 2


def test_an_armed_rank_makes_no_step_that_others_have_not_made(
    counter: StepCounter, control: ThreadPoolExecutor
) -> None:
    optimizer = SGD([parameter()])
    optimizer.step()
    counter.arm(CELL)
    control.submit(counter.aim, CELL, 1)
    with pytest.raises(KeyboardInterrupt) as caught:
        optimizer.step()
    assert counter.count == 1
    assert caught.type is KeyboardInterrupt


def test_a_rank_to_be_interrupted_after_its_step_finishes_the_loops_body_first(counter: StepCounter) -> None:
    optimizer = SGD([parameter()])
    log: list[str] = []
    with pytest.raises(StepStop):
        for _ in range(3):
            log.append(f"before the step: {counter.finishing()}")
            optimizer.step()
            log.append(f"after it: {counter.finishing()}")
            log.append("counted")
    assert log == ["before the step: False", "after it: True", "counted"]


def test_a_rank_to_be_interrupted_behind_its_loop_is_at_once(counter: StepCounter) -> None:
    names = {"optimizer": SGD([parameter()]), "counter": counter}
    exec("for _ in range(3):\n    optimizer.step()\nfinishing = counter.finishing()", names)
    assert names["finishing"] is False


def test_a_stop_that_is_called_off_lets_the_waiting_rank_go_on(
    counter: StepCounter, control: ThreadPoolExecutor
) -> None:
    def arm_once(_: Optimizer) -> None:
        if counter.count == 1:
            counter.arm(CELL)

    def call_off() -> None:
        control.submit(counter.disarm, CELL)

    stop = of_this_thread().listen(after=arm_once)
    counter.after_step = call_off
    for_loop_of_three(SGD([parameter()]).step)
    stop()
    assert counter.count == 3
    assert counter.stopped is None


def test_an_interrupt_breaks_the_wait(counter: StepCounter, control: ThreadPoolExecutor) -> None:
    main = threading.main_thread().ident or 0

    def arm(_: Optimizer) -> None:
        counter.arm(CELL)

    def interrupt() -> None:
        control.submit(signal.pthread_kill, main, signal.SIGINT)

    stop = of_this_thread().listen(after=arm)
    counter.after_step = interrupt
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # shells have background jobs ignore it
    try:
        with pytest.raises(KeyboardInterrupt) as caught:
            for_loop_of_three(SGD([parameter()]).step)
    finally:
        signal.signal(signal.SIGINT, before)
        stop()
    assert not isinstance(caught.value, StepStop)
    assert counter.count == 1


# --- a stop that waits for the end of the loop's body


def test_a_pending_stop_is_overdue_after_a_while(counter: StepCounter) -> None:
    woken: list[bool] = []
    waking = StepCounter(wake=lambda: woken.append(True))
    counter.uninstall()
    waking.install()
    try:
        waking.begin(CELL)
        ask(waking, target=1)
        assert waking.overdue() is None
        SGD([parameter()]).step()
        due = waking.overdue()
        waking.disarm(CELL)
    finally:
        waking.end(CELL)
        waking.uninstall()
    assert woken == [True]
    assert due is not None
    assert waking.overdue() is None


def test_a_pending_stop_that_is_called_off_leaves_no_trace(counter: StepCounter, control: ThreadPoolExecutor) -> None:
    ask(counter, target=2)
    optimizer = SGD([parameter()])
    log: Log = []
    for number in range(1, 5):
        optimizer.step()
        if number == 2:
            assert sys.gettrace() is not None
            control.submit(counter.disarm, CELL).result()
        log.append("end")
    assert log == ["end"] * 4
    assert sys.gettrace() is None
    assert sys._getframe().f_trace is None


def test_a_process_that_the_cell_forks_is_not_stopped(counter: StepCounter) -> None:
    ask(counter, target=1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # there are threads: the child starts none
        child = os.fork()
    if child == 0:
        status = 1
        with contextlib.suppress(KeyboardInterrupt):
            for_loop_of_three(SGD([parameter()]).step)
            status = 0
        os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
