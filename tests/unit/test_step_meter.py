"""What training steps take, measured as they run in this process: exactly, and with nothing of it in the user's way."""

from __future__ import annotations

import itertools
import subprocess
import sys
import threading
import time
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import LBFGS, SGD, AdamW

from nbdist.metrics import steps
from nbdist.metrics.compute.counting import FlopCount
from nbdist.metrics.events.clock import DeviceClock
from nbdist.metrics.node import active_meter
from nbdist.metrics.node.sample import StepSample
from nbdist.metrics.steps import StepMeter
from testbed.closed_forms import Gpt, gpt, gpt_scores_again, indices, loss_of
from tests.support.step_loops import B, Clock, T, measured, train

pytestmark = [pytest.mark.torch_private, pytest.mark.usefixtures("one_thread")]


# --- laps


def test_a_lap_is_of_its_own_steps_and_the_pause_behind_it_of_none(meter: StepMeter) -> None:
    model = Gpt()
    optimizer = SGD(model.parameters(), 0.01)
    train(model, optimizer, *[(B, T)] * 4)
    assert meter.sample().in_cell == 4
    assert meter.lap().steps == 4
    assert meter.sample().in_cell == 0
    threading.Event().wait(0.5)
    began = time.perf_counter()
    train(model, optimizer, *[(B, T)] * 3)
    assert meter.sample().in_cell == 3 and meter.sample().steps == 7
    found = meter.lap()
    assert found.steps == 3 and found.seconds is not None and found.seconds <= time.perf_counter() - began
    assert found.flops == gpt(B, T)
    assert meter.lap() == StepSample(why="no step yet")


def test_a_lap_that_ends_within_a_counted_step_leaves_nothing_active(meter: StepMeter) -> None:
    model = Gpt()
    train(model, SGD(model.parameters(), 0.01), (B, T))
    assert torch._C._len_torch_dispatch_stack() == 1
    assert "too few" in meter.lap().why or "counted" in meter.sample().why
    assert torch._C._len_torch_dispatch_stack() == 0
    assert torch._dynamo.eval_frame._stance.stance == "default"


# --- time


def stalling(meter: StepMeter, clock: Clock, steps: int) -> None:
    """Steps of a second, after every fourth of which there is a stall of four."""
    model = nn.Linear(4, 2)
    optimizer = SGD(model.parameters(), 0.01)
    for number in range(1, steps + 1):
        model(torch.randn(1, 4)).sum().backward()
        clock.now += 1.0
        optimizer.step()
        clock.now += 4.0 if number % 4 == 0 else 0.0


def test_seconds_of_a_step_include_the_stalls_between_steps(meter: StepMeter, monkeypatch: pytest.MonkeyPatch) -> None:
    stalling(meter, Clock(monkeypatch), 42)  # from the second on, with ten stalls
    found = meter.lap()
    assert (found.seconds, found.typical) == ((41 + 10 * 4) / 41, 1.0)


def test_what_counting_took_is_known_of_each_lap(meter: StepMeter, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, model = Clock(monkeypatch), nn.Linear(4, 2)
    optimizer = SGD(model.parameters(), 0.01)

    def steps(count: int, rows: int) -> None:
        for _ in range(count):
            model(torch.ones(rows, 4)).sum().backward()
            clock.now += 4.0 if torch._C._len_torch_dispatch_stack() else 1.0
            optimizer.step()

    steps(20, rows=8)
    first = meter.lap()
    assert (first.timed, first.seconds, first.counting) == (19, 1.0, 3.0)
    steps(5, rows=8)
    assert meter.lap().counting == 0.0
    steps(20, rows=16)
    assert meter.lap().counting >= 3.0


def test_passes_that_no_step_follows_are_reported_with_what_may_be_the_reason(meter: StepMeter) -> None:
    model = nn.Linear(4, 2)
    for _ in range(3):
        model(torch.ones(8, 4)).sum().backward()
    found = meter.lap()
    assert found.passes == 3 and "without an optimizer" in found.why
    assert meter.lap().passes == 0


def test_steps_in_another_thread_are_reported_as_such(meter: StepMeter) -> None:
    thread = threading.Thread(target=train, args=(model := Gpt(), SGD(model.parameters(), 0.01), *[(B, T)] * 3))
    thread.start()
    thread.join()
    found = meter.lap()
    assert found.passes == 3 and "another thread" in found.why
    assert meter.lap() == StepSample(why="no step yet")


def test_steps_beyond_those_that_are_kept_count_too(meter: StepMeter, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps, "LAP", 4)
    clock = Clock(monkeypatch)
    for width, seconds in (8, 4.0), (16, 1.0):
        model = nn.Linear(width, width)
        optimizer = SGD(model.parameters(), 0.01)
        for _ in range(11):
            model(torch.randn(4, width)).sum().backward()
            clock.now += seconds
            optimizer.step()
    found = meter.lap()
    assert (found.steps, found.uncounted) == (22, 0)
    assert found.seconds == (10 * 4.0 + 11 * 1.0) / 21  # the first begins
    assert found.flops == 2 * 2 * 4 * (10 * 8 * 8 + 11 * 16 * 16) / 21


def test_the_latest_steps_are_as_true_as_the_whole_lap(meter: StepMeter, monkeypatch: pytest.MonkeyPatch) -> None:
    stalling(meter, Clock(monkeypatch), 42)
    assert meter.sample().seconds == pytest.approx(2.0, rel=0.11)  # half a stall of ten seconds of steps


def test_a_stall_that_lasts_slows_the_rate_before_it_is_over(meter: StepMeter, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    stalling(meter, clock, 42)
    before = meter.sample().seconds
    clock.now += 100.0
    after = meter.sample().seconds
    assert before is not None and after is not None and after >= before + 5.0
    lap = meter.lap().seconds
    clock.now += 100.0
    assert meter.sample().seconds == pytest.approx(before)
    assert lap == (41 + 10 * 4) / 41


# --- the user's own things


def test_an_error_in_the_loop_costs_only_its_own_cell(meter: StepMeter) -> None:
    model = Gpt()
    optimizer = SGD(model.parameters(), 0.01)
    train(model, optimizer, *[(B, T)])
    with pytest.raises(IndexError):
        model(torch.full((B, T), 10_000))
    meter.lap()
    train(model, optimizer, *[(B, T)] * 12)
    assert meter.sample().flops == gpt(B, T)


def test_a_step_that_raises_does_not_hide_those_of_other_optimizers(meter: StepMeter) -> None:
    class Failing(SGD):
        def step(self, closure: Any = None) -> Any:
            raise ArithmeticError

    model = Gpt()
    with pytest.raises(ArithmeticError):
        Failing(model.parameters(), 0.01).step()
    train(model, SGD(model.parameters(), 0.01), *[(B, T)] * 4)
    assert (meter.sample().steps, meter.sample().flops) == (4, gpt(B, T))


def test_an_optimizer_inside_another_makes_one_step(meter: StepMeter) -> None:
    class Wrapper(SGD):
        def step(self, closure: Any = None) -> Any:
            inner.step()

    model = Gpt()
    inner = AdamW(model.parameters(), 0.01)
    train(model, Wrapper(model.parameters(), 0.01), *[(B, T)] * 4)
    assert meter.sample().steps == 4


def test_a_step_that_calls_the_one_it_inherits_is_one_step(meter: StepMeter) -> None:
    class Refined(SGD):
        def step(self, closure: Any = None) -> Any:
            return super().step(closure)

    model = Gpt()
    SGD(model.parameters(), 0.01)  # from here on torch calls the hooks for what Refined inherits, too
    train(model, Refined(model.parameters(), 0.01), *[(B, T)] * 4)
    assert meter.sample().steps == 4


def test_passes_inside_a_step_belong_to_it(meter: StepMeter) -> None:
    model = nn.Linear(4, 2, bias=False)
    optimizer = LBFGS(model.parameters(), max_iter=3)
    inputs = torch.randn(8, 4)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = model(inputs).square().mean()
        loss.backward()
        return loss

    for _ in range(3):
        optimizer.step(closure)
    assert meter.sample().steps == 3


def test_a_dispatch_mode_of_the_user_comes_first(meter: StepMeter) -> None:
    from torch.utils.flop_counter import FlopCounterMode

    model = Gpt()
    optimizer = SGD(model.parameters(), 0.01)
    with FlopCounterMode(display=False):
        train(model, optimizer, *[(B, T)] * 3)
    assert meter.sample().flops is None and "dispatch mode of yours" in meter.sample().why
    train(model, optimizer, (B, T))
    with FlopCounterMode(display=False) as theirs:
        train(model, optimizer, (B, T))  # its end falls into this step, which is being counted
    assert theirs.get_total_flops() > 0
    train(model, optimizer, *[(B, T)] * 5)
    assert meter.sample().flops == gpt(B, T)


def test_a_mode_that_outlives_a_cell_costs_the_count_and_nothing_else(meter: StepMeter) -> None:
    from torch.utils.flop_counter import FlopCounterMode

    model, mode = Gpt(), FlopCounterMode(display=False)
    optimizer = SGD(model.parameters(), 0.01)
    train(model, optimizer, (B, T))
    loss_of(model, indices(B, T))
    mode.__enter__()
    meter.lap()
    mode.__exit__(None, None, None)
    train(model, optimizer, *[(B, T)] * 5)
    assert meter.lap().flops == gpt(B, T)


def test_control_flow_that_runs_without_a_meter_runs_with_one() -> None:
    """In a process of its own, for which torch.cond has been used from then on."""
    done = subprocess.run([sys.executable, "-c", CONTROL_FLOW], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("3 torch.cond and torch.map, which were used here")


CONTROL_FLOW = """
import torch
from nbdist.metrics.steps import StepMeter

weight = torch.ones(3, requires_grad=True)
optimizer = torch.optim.SGD([weight], 0.1)
with StepMeter() as meter:
    for _ in range(3):
        torch.cond(weight.sum() > 0, lambda x: x.sin(), lambda x: x.cos(), (weight,)).sum().backward()
        optimizer.step()
    print(meter.sample().steps, meter.sample().why)
"""


def test_a_model_is_saved_and_copied_as_without_a_meter(meter: StepMeter, tmp_path: Any) -> None:
    model = Gpt()
    train(model, SGD(model.parameters(), 0.01), *[(B, T)] * 3)
    torch.save(model, tmp_path / "model.pt")
    assert b"nbdist" not in (tmp_path / "model.pt").read_bytes().replace(b"nbdist_tests", b"")


def test_everything_is_taken_off_again() -> None:
    from torch.optim import optimizer
    from torch.utils.data import dataloader

    places = torch.autograd._engine_run_backward, dataloader._BaseDataLoaderIter.__next__
    hooks = len(optimizer._global_optimizer_pre_hooks), len(optimizer._global_optimizer_post_hooks)
    measured(Gpt(), *[(B, T)] * 2)
    assert places == (torch.autograd._engine_run_backward, dataloader._BaseDataLoaderIter.__next__)
    assert hooks == (len(optimizer._global_optimizer_pre_hooks), len(optimizer._global_optimizer_post_hooks))


def test_what_fails_inside_is_told_and_the_loop_goes_on(meter: StepMeter, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nbdist.metrics.events.passes.PassReader.read", lambda reader, outputs: 1 / 0)
    model = Gpt()
    train(model, SGD(model.parameters(), 0.01), *[(B, T)] * 4)
    found = meter.sample()
    assert found.steps == 4 and found.seconds and found.flops is None and "ZeroDivisionError" in found.why


def test_a_clock_that_runs_backwards_gives_no_time_and_no_rate(
    meter: StepMeter, monkeypatch: pytest.MonkeyPatch
) -> None:
    readings = itertools.count(1e6, -1)
    monkeypatch.setattr(time, "monotonic", lambda: next(readings))
    model = Gpt()
    train(model, SGD(model.parameters(), 0.01), *[(B, T)] * 4)
    found = meter.sample()
    assert found.steps == 4 and found.seconds is None and found.flops is None
    assert found.why == "the clock ran backwards"


# --- from another thread


def test_a_sample_comes_at_once_from_another_thread_while_steps_run() -> None:
    steps.start()
    try:
        model = Gpt()
        optimizer = SGD(model.parameters(), 0.01)
        found: list[StepSample | None] = []
        over = threading.Event()

        def look() -> None:
            while not over.is_set():
                found.append(active_meter.current_sample())

        thread = threading.Thread(target=look)
        thread.start()
        train(model, optimizer, *[(B, T)] * 20)
        over.set()
        thread.join()
        last = active_meter.current_sample()
        assert last is not None and last.flops == gpt(B, T)
        assert len(found) > 20 and all(each is not None for each in found)
    finally:
        active_meter.stop()
    assert active_meter.current_sample() is None


# --- clocks and peaks


class Events:
    """Events of a stream whose work ends when the test says: the interface of torch.cuda's, without a GPU."""

    def __init__(self) -> None:
        self.made: list[Events.Event] = []
        self.passed = 0

    class Event:
        def __init__(self, stream: Events) -> None:
            self.stream, self.number = stream, len(stream.made)
            stream.made.append(self)

        def record(self) -> None: ...

        def query(self) -> bool:
            return self.number < self.stream.passed

        def elapsed_time(self, later: Events.Event) -> float:
            return 100.0 * (later.number - self.number)

    def make(self) -> Events.Event:
        return Events.Event(self)


def test_steps_on_a_device_are_timed_by_its_own_clock_once_they_are_over() -> None:
    stream = Events()
    clock: DeviceClock[str] = DeviceClock(stream.make)
    for step in ("begins", "a", "b"):
        clock.tick(step, 0.0)
    assert clock.ended() == []
    stream.passed = 2
    clock.tick("c", 0.0)
    assert clock.ended() == [("a", 0.1)]
    stream.passed = 4
    assert clock.restart() == [("b", 0.1), ("c", 0.1)]
    clock.tick("begins anew", 0.0)
    assert clock.ended() == []


def test_a_step_is_timed_in_the_stream_of_the_device_that_trains_though_another_is_current(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    recorded = []

    class Event:
        def __init__(self, *, enable_timing: bool) -> None:
            assert enable_timing

        def record(self, stream: str) -> None:
            recorded.append(stream)

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device="cuda:0": f"stream of {device}")
    steps.recorded_event(torch.device("cuda", 1))
    assert recorded == ["stream of cuda:1"]


def train_on(stream: Events, meter: StepMeter) -> None:
    """Have the meter time steps as those of a device that does what it is given in this stream."""
    meter._clock = DeviceClock(stream.make)


def test_waiting_that_a_device_hides_is_none(meter: StepMeter) -> None:
    stream = Events()
    train_on(stream, meter)
    see, step = meter._see_batch, meter._gathered
    see(None, None)
    see(1.0, torch.ones(2, 4))
    assert step.waiting == 0.0
    see(None, None)
    stream.passed = len(stream.made)
    see(1.0, torch.ones(2, 4))
    assert step.waiting == 1.0


def test_an_evaluation_on_a_device_is_timed_by_its_own_clock(meter: StepMeter) -> None:
    """Every tick is 100 ms: two before a step that an evaluation comes before, and one at its end."""
    stream, model = Events(), nn.Linear(4, 2)
    optimizer = SGD(model.parameters(), 0.01)
    for number in range(41):
        if number == 1:
            train_on(stream, meter)
        if number % 4 == 3:
            model.eval()
            with torch.no_grad():
                model(torch.ones(1, 4))
            model.train()
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()
        stream.passed = len(stream.made)
    found = meter.lap()
    assert found.seconds == pytest.approx(0.15, rel=0.05) and found.evaluation == pytest.approx(1 / 6, rel=0.05)


def test_a_device_that_does_not_end_holds_nobody_up() -> None:
    stream = Events()
    clock: DeviceClock[str] = DeviceClock(stream.make)
    clock.tick("begins", 0.0)
    clock.tick("hangs", 0.0)
    assert clock.restart() == []
    stream.passed = 2
    clock.tick("begins anew", 0.0)
    assert clock.ended() == []


def test_the_processor_has_no_peak_until_one_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    from nbdist.metrics.rates import peaks

    monkeypatch.setattr(peaks, "measured_peaks", {})
    model = Gpt()
    assert "no peak is known for the CPU at fp32" in measured(model, *[(B, T)] * 4).why
    peaks.note(torch.device("cpu"), "fp32", 0.05)
    found = measured(model, *[(B, T)] * 4)
    assert found.peak == 0.05e12 and found.peak_source.startswith("measured here")


@pytest.mark.gpu
def test_on_a_gpu_fused_attention_counts_as_the_textbook_does_and_steps_have_its_time() -> None:
    model = Gpt().to("cuda", torch.bfloat16)
    optimizer = SGD(model.parameters(), 0.01)
    with StepMeter() as meter:
        for _ in range(20):
            loss_of(model, indices(B, T).cuda()).backward()
            optimizer.step()
            optimizer.zero_grad()
        found = meter.lap()
    assert found.flops == gpt(B, T) and found.seconds is not None
    assert found.hardware_flops in (gpt(B, T), gpt(B, T) + gpt_scores_again(B, T))
    assert (found.peak is None) == ("no peak is known" in found.why)


def test_a_count_is_a_plain_value() -> None:
    assert "not counted: mylib.gemm (2 calls)" in str(FlopCount(1, 2, uncounted={"mylib.gemm": 2}))
