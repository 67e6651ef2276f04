"""What training steps take, measured as they run in this process: exactly, and with nothing of it in the user's way."""

from __future__ import annotations

import itertools
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import LBFGS, SGD, AdamW
from torch.utils.data import DataLoader, TensorDataset

from nbdist.metrics import steps
from nbdist.metrics.compute import loading
from nbdist.metrics.compute.clock import DeviceClock
from nbdist.metrics.compute.counting import FlopCount, bears_compiled_code
from nbdist.metrics.node import active_meter
from nbdist.metrics.node.sample import StepSample
from nbdist.metrics.steps import StepMeter
from testbed.closed_forms import Gpt, Graphs, gpt, gpt_blocks, gpt_scores_again, indices, loss_of

pytestmark = pytest.mark.torch_private

beside_compiled = pytest.mark.skipif(
    not bears_compiled_code(), reason="modes of this torch switch compiled code off, so it is not counted"
)

B, T = 2, 16


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """These models are small: threads that wait for each other would take most of the time."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def meter() -> Iterator[StepMeter]:
    with StepMeter() as meter:
        yield meter
    assert torch._C._len_torch_dispatch_stack() == 0


def train(model: nn.Module, optimizer: torch.optim.Optimizer, *shapes: tuple[int, int], passes: int = 1) -> None:
    """A step for each shape, of as many backward passes."""
    for shape in shapes:
        for _ in range(passes):
            loss_of(model, indices(*shape)).backward()
        optimizer.step()
        optimizer.zero_grad()


def measured(model: nn.Module, *shapes: tuple[int, int], **options: Any) -> StepSample:
    with StepMeter() as meter:
        train(model, SGD(model.parameters(), 0.01), *shapes, **options)
        return meter.sample()


# --- exact


def test_the_flops_of_a_step_are_the_textbooks() -> None:
    found = measured(Gpt(), *[(B, T)] * 5)
    assert (found.flops, found.hardware_flops) == (gpt(B, T), gpt(B, T) + gpt_scores_again(B, T))
    assert (found.steps, found.uncounted, found.unit, found.units) == (5, 0.0, "tokens", B * T)
    assert found.seconds is not None and found.seconds > 0


def test_a_step_of_several_passes_takes_them_all() -> None:
    assert measured(Gpt(), *[(B, T)] * 4, passes=3).flops == 3 * gpt(B, T)


def test_what_is_recomputed_is_hardwares_only() -> None:
    found = measured(Gpt("manual", "reentrant"), *[(B, T)] * 6)
    assert (found.flops, found.hardware_flops) == (gpt(B, T), gpt(B, T) + gpt_blocks(B, T))


@beside_compiled
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # of dynamo's own
@pytest.mark.parametrize("per_block", [False, True])
def test_compiled_steps_are_counted_and_go_on_compiled(meter: StepMeter, per_block: bool) -> None:
    torch._dynamo.reset()
    backend, model = Graphs(), Gpt()
    for part in model.blocks if per_block else [model]:
        part.compile(backend=backend)
    optimizer = SGD(model.parameters(), 0.01)
    each = []
    for _ in range(5):
        before = backend.runs
        train(model, optimizer, (B, T))
        each.append(backend.runs - before)
    graphs = 3 if per_block else 1
    assert each == [graphs] * 5
    assert meter.sample().flops == gpt(B, T)


@beside_compiled
@pytest.mark.filterwarnings("ignore")  # of dynamo's own
@pytest.mark.parametrize("compiled", ["model", "blocks", "loss"])
def test_steps_with_a_compiled_backward_pass_take_what_the_counted_one_did(meter: StepMeter, compiled: str) -> None:
    torch._dynamo.reset()
    model, loss = Gpt(), loss_of
    parts: dict[str, Any] = {"model": [model], "blocks": model.blocks}
    for part in parts.get(compiled, []):
        part.compile(backend="aot_eager")
    if compiled == "loss":
        loss = torch.compile(loss_of, backend="aot_eager")
    optimizer = SGD(model.parameters(), 0.01)
    for _ in range(5):  # compiled, counted, compiled; torch 2.8 compiles anew then, and that is counted too
        loss(model, indices(B, T)).backward()
        optimizer.step()
    found = meter.sample()
    assert (found.flops, found.uncounted) == (gpt(B, T), 0.0)


@beside_compiled
@pytest.mark.filterwarnings("ignore")  # of dynamo's own
def test_compiled_steps_of_several_shapes_are_told_apart(meter: StepMeter) -> None:
    torch._dynamo.reset()
    model = Gpt()
    model.compile(backend="aot_eager")
    optimizer = SGD(model.parameters(), 0.01)
    for _ in range(2):  # the second shape has its graph made anew, for shapes of all kinds
        train(model, optimizer, *[(B, T)] * 4, *[(B, 2 * T)] * 4)
    meter.lap()
    train(model, optimizer, *[(B, T), (B, 2 * T)] * 4)  # too few to look at what is known once more
    train(model, optimizer, (B, T))
    found = meter.lap()
    assert (found.flops, found.uncounted) == ((gpt(B, T) + gpt(B, 2 * T)) / 2, 0.0)


# --- shapes


def test_each_shape_is_counted_once_and_a_sample_is_of_their_mixture(meter: StepMeter) -> None:
    model = Gpt()
    optimizer = SGD(model.parameters(), 0.01)
    train(model, optimizer, *[(B, T)] * 3, *[(B, 2 * T)] * 3)
    meter.lap()
    train(model, optimizer, (B, T), *[(B, 2 * T), (B, T)] * 4)
    found = meter.lap()
    assert found.flops == (gpt(B, T) + gpt(B, 2 * T)) / 2 and found.uncounted == 0


def test_steps_of_a_shape_that_was_not_counted_are_told_and_left_out(meter: StepMeter) -> None:
    model = Gpt()
    optimizer = SGD(model.parameters(), 0.01)
    train(model, optimizer, *[(B, T)] * 8, (3, T))
    found = meter.sample()
    assert found.flops == gpt(B, T) and found.uncounted == pytest.approx(1 / 7)


def test_shapes_that_take_turns_are_looked_at_once_more_in_a_lap_each(meter: StepMeter) -> None:
    model = Gpt()
    optimizer = SGD(model.parameters(), 0.01)
    train(model, optimizer, *[(B, T)] * 3, *[(B, 2 * T)] * 3)
    meter.lap()
    counted = 0
    for shape in [(B, T), (B, 2 * T)] * 30:
        counted += torch._C._len_torch_dispatch_stack()
        train(model, optimizer, shape)
    assert 1 <= counted <= 2


def test_two_optimizers_that_take_turns_are_both_counted(meter: StepMeter) -> None:
    one, other = Gpt(layers=1), Gpt(layers=2)
    optimizers = SGD(one.parameters(), 0.01), SGD(other.parameters(), 0.01)
    for _ in range(8):
        train(one, optimizers[0], (B, T))
        train(other, optimizers[1], (B, T))
    found = meter.sample()
    head = 3 * (gpt_blocks(B, T) // 3)
    assert found.uncounted == 0 and found.flops == pytest.approx(gpt(B, T) - 3 * head / 2)


def test_a_validation_between_two_steps_is_not_taken_for_training(meter: StepMeter) -> None:
    model = Gpt()
    optimizer = SGD(model.parameters(), 0.01)
    for number in range(6):
        train(model, optimizer, (B, T))
        if number == 0:
            with torch.no_grad():
                model(indices(8 * B, T))
    assert meter.sample().flops == gpt(B, T)


@pytest.mark.parametrize("autograd", [True, False])
def test_nor_is_one_behind_a_smaller_last_batch_of_each_epoch(meter: StepMeter, autograd: bool) -> None:
    model = Gpt()
    optimizer = SGD(model.parameters(), 0.01)
    for _ in range(4):
        train(model, optimizer, *[(B, T)] * 6, (1, T))
        with torch.set_grad_enabled(autograd):
            model(indices(8 * B, T))
    flops = meter.lap().flops
    assert flops is not None and gpt(1, T) < flops <= gpt(B, T)


def one_ahead(loader: DataLoader[tuple[Tensor, ...]]) -> Iterator[tuple[Tensor, ...]]:
    """Take each batch before the one that it follows is used, as Accelerate does: it says which one is the last."""
    batches = iter(loader)
    batch = next(batches)
    for following in batches:
        yield batch
        batch = following
    yield batch


@pytest.mark.parametrize("order", [iter, one_ahead])
def test_a_smaller_last_batch_of_each_epoch_is_counted_when_it_comes_again(
    meter: StepMeter, order: Callable[[DataLoader[tuple[Tensor, ...]]], Iterator[tuple[Tensor, ...]]]
) -> None:
    model = Gpt()
    optimizer = SGD(model.parameters(), 0.01)
    loader = DataLoader(TensorDataset(indices(B * 40 - 1, T)), batch_size=B)
    counted = 0
    for _ in range(5):
        for (ids,) in order(loader):
            loss_of(model, ids).backward()
            counted += torch._C._len_torch_dispatch_stack()
            optimizer.step()
            optimizer.zero_grad()
    found = meter.lap()
    assert found.flops == pytest.approx((39 * gpt(B, T) + gpt(1, T)) / 40, rel=0.005)
    assert found.uncounted == 0
    assert counted <= 10


def test_a_shape_that_came_once_is_not_waited_for_all_the_time(meter: StepMeter) -> None:
    model = Gpt(layers=1)
    optimizer = SGD(model.parameters(), 0.01)
    train(model, optimizer, *[(B, T)] * 4, (1, T), *[(B, T)] * 150)
    counted = 0
    for _ in range(50):
        counted += torch._C._len_torch_dispatch_stack()
        train(model, optimizer, (B, T))
    assert counted == 0


def test_a_teachers_forward_pass_is_part_of_each_step(meter: StepMeter) -> None:
    model, teacher = Gpt(), Gpt(layers=1)
    optimizer = SGD(model.parameters(), 0.01)
    for _ in range(6):
        with torch.no_grad():
            teacher(indices(B, T))
        train(model, optimizer, (B, T))
    found = meter.sample()
    assert found.flops is not None and found.flops > gpt(B, T)


# --- laps


def test_a_lap_is_of_its_own_steps_and_the_pause_behind_it_of_none(meter: StepMeter) -> None:
    model = Gpt()
    optimizer = SGD(model.parameters(), 0.01)
    train(model, optimizer, *[(B, T)] * 4)
    assert meter.sample().in_cell == 4
    assert meter.lap().steps == 4
    assert meter.sample().in_cell == 0
    threading.Event().wait(0.5)
    train(model, optimizer, *[(B, T)] * 3)
    assert meter.sample().in_cell == 3 and meter.sample().steps == 7
    found = meter.lap()
    assert found.steps == 3 and found.seconds is not None and found.seconds < 0.25
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


class Clock:
    """Time that passes when a test says so."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr(time, "perf_counter", lambda: self.now)
        monkeypatch.setattr(time, "monotonic", lambda: self.now)


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
    stalling(meter, Clock(monkeypatch), 42)  # timed from the third on: ten times four, with ten stalls
    found = meter.lap()
    assert (found.seconds, found.typical) == (2.0, 1.0)


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
    assert lap == 2.0


# --- data


def test_waiting_is_the_share_of_all_time_however_it_is_spread(
    meter: StepMeter, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock(monkeypatch)

    class Bursts(TensorDataset):
        def __getitem__(self, index: int) -> Any:
            clock.now += 4.0 if index % 4 == 3 else 0.0
            return super().__getitem__(index)  # type: ignore[no-untyped-call]

    model = nn.Linear(4, 2)
    optimizer = SGD(model.parameters(), 0.01)
    for (inputs,) in DataLoader(Bursts(torch.randn(30, 4)), batch_size=1):
        model(inputs).sum().backward()
        clock.now += 1.0
        optimizer.step()
    assert meter.lap().waiting == pytest.approx(0.5, abs=0.05)


def test_batches_of_a_validation_are_no_part_of_a_step(meter: StepMeter) -> None:
    model = nn.Linear(4, 2)
    optimizer = SGD(model.parameters(), 0.01)
    training, validation = (DataLoader(TensorDataset(torch.randn(rows, 4)), batch_size=8) for rows in (80, 800))
    for _ in range(2):
        for (inputs,) in training:
            model(inputs).sum().backward()
            optimizer.step()
        for (inputs,) in validation:
            model(inputs)
    assert meter.lap().units == 8


def test_a_batch_that_serves_several_steps_is_shared_by_them(meter: StepMeter) -> None:
    model = nn.Linear(4, 2)
    optimizer = SGD(model.parameters(), 0.01)
    for (inputs,) in DataLoader(TensorDataset(torch.randn(80, 4)), batch_size=8):
        for _ in range(4):
            model(inputs).sum().backward()
            optimizer.step()
    found = meter.lap()
    assert found.units is not None and found.units < 8


def test_waiting_for_data_is_told_and_samples_are_counted(meter: StepMeter) -> None:
    model = nn.Linear(4, 2)
    optimizer = SGD(model.parameters(), 0.01)
    loader = DataLoader(TensorDataset(torch.randn(48, 4), torch.randn(48, 2)), batch_size=8)
    for inputs, targets in loader:
        F.mse_loss(model(inputs), targets).backward()
        optimizer.step()
    found = meter.sample()
    assert found.waiting is not None and 0 < found.waiting <= 1
    assert (found.units, found.unit) == (8, "samples")


def test_without_a_loader_nothing_is_said_of_waiting() -> None:
    assert measured(Gpt(), *[(B, T)] * 4).waiting is None


@pytest.mark.parametrize(
    ("batch", "units", "unit"),
    [
        (indices(B, T), B * T, "tokens"),
        ({"input_ids": indices(B, T), "labels": indices(B, T)}, B * T, "tokens"),
        ((torch.randn(B, 3, 8, 8), torch.zeros(B, dtype=torch.long)), B, "samples"),
        ([torch.randn(B, 4), torch.ones(B, 4, dtype=torch.long)], B, "samples"),
        ("text", 0, ""),
    ],
)
def test_a_batch_is_read_by_its_shapes(batch: Any, units: int, unit: str) -> None:
    found = loading.describe(batch)
    assert (found.units, found.unit) == (units, unit)


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
    monkeypatch.setattr("nbdist.metrics.compute.passes.PassReader.read", lambda reader, outputs: 1 / 0)
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


def test_waiting_that_a_device_hides_is_none(meter: StepMeter) -> None:
    stream = Events()
    meter._clock = DeviceClock(stream.make)
    meter._see_batch(None, None)
    meter._see_batch(1.0, torch.ones(2, 4))
    assert meter._gathered.waiting == 0.0
    meter._see_batch(None, None)
    stream.passed = len(stream.made)
    meter._see_batch(1.0, torch.ones(2, 4))
    assert meter._gathered.waiting == 1.0


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
    from nbdist.metrics.compute import peaks

    monkeypatch.setattr(peaks, "_measured", {})
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
