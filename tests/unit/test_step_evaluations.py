"""How much of a loop's time evaluations take, and what only looks like one."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD
from torch.utils.data import DataLoader, TensorDataset

from nbdist.client.costs.cell_steps import explain, render
from nbdist.metrics.node.sample import StepSample
from nbdist.metrics.steps import StepMeter
from tests.support.step_loops import Clock

pytestmark = [pytest.mark.torch_private, pytest.mark.usefixtures("one_thread")]

ROOT = str(Path(__file__).parents[2])
EVERY, LASTS = 10, 4.0  # steps of a second each, between evaluations of so many seconds


class Loop:
    """A model, and time that passes as it is used: a second for a step, half a second for a pass of an evaluation."""

    def __init__(self, clock: Clock) -> None:
        self.clock, self.model = clock, nn.Linear(4, 2)
        self.optimizer = SGD(self.model.parameters(), 0.01)

    def step(self, inputs: Tensor | None = None) -> None:
        self.model(torch.ones(8, 4) if inputs is None else inputs).sum().backward()
        self.clock.now += 1.0
        self.optimizer.step()

    def evaluate(self) -> None:
        for _ in range(8):
            self.model(torch.ones(8, 4))
            self.clock.now += LASTS / 8


@pytest.fixture
def loop(monkeypatch: pytest.MonkeyPatch) -> Loop:
    return Loop(Clock(monkeypatch))


def without_gradients(loop: Loop) -> None:
    loop.model.eval()
    with torch.no_grad():
        loop.evaluate()


@torch.inference_mode()
def in_inference_mode(loop: Loop) -> None:
    loop.model.eval()
    loop.evaluate()


def by_phase(loop: Loop) -> None:
    loop.model.eval()
    with torch.set_grad_enabled(False):
        loop.evaluate()


def with_gradients(loop: Loop) -> None:
    loop.model.eval()
    loop.evaluate()
    loop.model.train()


def batch_by_batch(loop: Loop) -> None:
    """As a Trainer does: what comes between two passes is part of it, what follows the last one is not."""
    loop.model.eval()
    for _ in range(2):
        loop.clock.now += LASTS / 4
        with torch.no_grad():
            loop.clock.now += LASTS / 4


Evaluate = Callable[[Loop], None]
WAYS = [without_gradients, in_inference_mode, by_phase, with_gradients, batch_by_batch]


@pytest.mark.parametrize("evaluate", WAYS)
def test_evaluations_between_steps_are_told_from_stalls(
    meter: StepMeter, loop: Loop, evaluate: Callable[[Loop], None]
) -> None:
    for number in range(1, 102):
        loop.step()
        loop.model.train()
        if number % EVERY == 0:
            evaluate(loop)
            loop.clock.now += 1.0  # writes a checkpoint
    found = meter.lap()
    assert found.seconds is not None
    assert found.seconds == pytest.approx((EVERY + LASTS + 1.0) / EVERY, rel=0.02)  # all time, as ever
    assert found.evaluation == pytest.approx(LASTS / (EVERY + LASTS + 1.0), rel=0.02)


def test_an_evaluation_of_two_percent_has_a_clause_and_the_rate_without_it(meter: StepMeter, loop: Loop) -> None:
    for number, (inputs,) in enumerate(DataLoader(TensorDataset(torch.ones(8 * 1600, 4)), batch_size=8), 1):
        loop.step(inputs)
        if number % 160 == 0:
            without_gradients(loop)
    found = meter.lap()
    words = "evaluation took 2 % of the time; without it a step takes 1.00 s, 8 samples/s"
    assert words in render({0: found}) and words in explain({0: found})
    assert "2 % evaluation" in explain({0: found})


def test_what_trains_without_gradients_is_no_evaluation_and_one_beside_it_is(meter: StepMeter, loop: Loop) -> None:
    for number in range(1, 102):
        with torch.no_grad():  # a teacher, and now and then the moving average of the weights
            loop.clock.now += 1.0 if number % 7 else 3.0
        loop.step()
        if number == EVERY - 1:
            assert meter.sample().evaluation == 0
        if number % EVERY == 0:
            without_gradients(loop)
            loop.model.train()
    found = meter.lap()
    assert found.seconds is not None
    assert found.evaluation * found.seconds == pytest.approx(LASTS / EVERY, rel=0.05)


def test_an_evaluation_that_nothing_marks_as_one_is_named_as_code_without_gradients(
    meter: StepMeter, loop: Loop
) -> None:
    for number in range(1, 102):
        with torch.no_grad():
            loop.clock.now += 0.25  # a teacher, which is a part of each step
        loop.step()
        if number % EVERY == 0:
            with torch.no_grad():
                loop.evaluate()
    found = meter.lap()
    assert found.evaluation == 0
    assert found.without_gradients == pytest.approx(LASTS / (EVERY * 1.25 + LASTS), rel=0.02)
    words = "code without gradients between steps took 24 % of the time: if that evaluates, call eval() on the model"
    assert words in render({0: found}).replace("\n    ", " ")


def test_an_evaluation_after_each_step_is_known_by_its_mode(meter: StepMeter, loop: Loop) -> None:
    teacher = nn.Linear(4, 2)
    for _ in range(40):
        teacher.eval()  # which no optimizer moves
        with torch.no_grad():
            loop.clock.now += 0.5
        loop.step()
    assert meter.lap().evaluation == 0
    for _ in range(40):
        loop.step()
        loop.model.eval()
        without_gradients(loop)
        loop.model.train()
    assert meter.lap().evaluation == pytest.approx(0.8, rel=0.02)


def test_training_in_evaluation_mode_is_training(meter: StepMeter, loop: Loop) -> None:
    for _ in range(40):
        loop.model.eval()  # so that dropout is off
        loop.step()
    assert meter.lap().evaluation == 0


@pytest.mark.parametrize("gradients", [True, False])
def test_waiting_for_batches_of_a_validation_is_part_of_it(meter: StepMeter, loop: Loop, gradients: bool) -> None:
    class Slow(TensorDataset):
        def __getitem__(self, index: int) -> tuple[Tensor, ...]:
            loop.clock.now += 0.25
            return super().__getitem__(index)  # type: ignore[no-untyped-call]

    training, validation = (DataLoader(kind(torch.ones(80, 4)), batch_size=8) for kind in (TensorDataset, Slow))
    for _ in range(40):
        for (inputs,) in training:
            loop.step(inputs)
        with torch.set_grad_enabled(gradients):
            for (inputs,) in validation:
                loop.model(inputs)
    found = meter.lap()
    assert found.evaluation == pytest.approx(20 / 30, rel=0.03)  # of the first one, the wait for its first batch is not
    assert found.waiting == pytest.approx(0.0, abs=0.01) and found.units == 8


def test_one_that_a_counted_step_begins_with_counts_too(meter: StepMeter, loop: Loop) -> None:
    """Half of the steps are of the first shape of two, which each is counted after an evaluation."""
    for rows in (8, 16):
        for _ in range(4):
            loop.model.eval()
            without_gradients(loop)
            loop.model.train()
            loop.step(torch.ones(rows, 4))
    assert meter.lap().evaluation == pytest.approx(0.8, rel=0.02)


@pytest.mark.parametrize("every", [2, 5])
@pytest.mark.parametrize("evaluate", [without_gradients, torch.no_grad()(Loop.evaluate), Loop.evaluate])
def test_counted_steps_take_no_evaluation_out_of_the_time(
    meter: StepMeter, loop: Loop, evaluate: Evaluate, every: int
) -> None:
    for number in range(1, 5 * every + 1):
        loop.step()
        if number % every == 0:
            evaluate(loop)
            loop.model.train()
    steps = 5 * every - 1
    assert meter.lap().seconds == pytest.approx((steps + 4 * LASTS) / steps, rel=0.02)


def test_a_validation_with_the_only_dataloader_is_known_by_its_mode(meter: StepMeter, loop: Loop) -> None:
    validation = DataLoader(TensorDataset(torch.ones(16, 4)), batch_size=2)
    for number in range(1, 26):
        loop.step()
        if number % 5 == 0:
            loop.model.eval()
            with torch.no_grad():
                for (inputs,) in validation:
                    loop.model(inputs)
                    loop.clock.now += LASTS / 8
            loop.model.train()
    found = meter.lap()
    assert found.seconds == pytest.approx((24 + 4 * LASTS) / 24, rel=0.02)
    assert found.evaluation == pytest.approx(4 * LASTS / (24 + 4 * LASTS), rel=0.02) and found.units is None


def seen_from_outside(meter: StepMeter) -> StepSample:
    """What another thread is told, as the panel's."""
    with ThreadPoolExecutor(1) as threads:
        return threads.submit(meter.sample).result()


def test_an_evaluation_that_lasts_is_seen_while_it_does(meter: StepMeter, loop: Loop) -> None:
    for _ in range(20):
        loop.step()
    loop.model.eval()
    with torch.no_grad():
        loop.clock.now += 40.0
        assert seen_from_outside(meter).evaluation > 0.5
    for _ in range(20):
        loop.step()
    loop.model.eval()
    with torch.no_grad():
        loop.clock.now += 20.0
    loop.clock.now += 20.0  # until the next batch is there
    assert seen_from_outside(meter).evaluation > 0.5


COMPILED = """
import torch
from torch import nn
from nbdist.metrics.steps import StepMeter

model, frames = nn.Sequential(nn.Linear(4, 4), nn.Dropout()), torch._dynamo.utils.counters["frames"]

def whole(inputs):
    with torch.no_grad():
        hidden = model(inputs)
    model.eval()
    with torch.set_grad_enabled(False), torch.inference_mode(False):
        hidden = model(hidden)
    model.train()
    return hidden

def broken(inputs):
    with torch.no_grad():
        hidden = model(inputs)
        torch._dynamo.graph_break()
        hidden = hidden + 1
    model.eval()
    torch._dynamo.graph_break()
    model.train()
    return model(hidden)

def compiled():
    torch._dynamo.reset()
    frames.clear()
    torch.compile(whole, backend="eager", fullgraph=True)(torch.ones(2, 4))
    torch.compile(broken, backend="eager")(torch.ones(2, 4))
    return dict(frames)

bare = compiled()
with StepMeter():
    assert compiled() == bare, (compiled(), bare)

    @torch.jit.script
    def scripted(inputs: torch.Tensor):
        with torch.no_grad():
            return inputs * 2

    print(scripted(torch.ones(2)).sum().item())
"""


def test_compiled_code_that_switches_gradients_and_modes_is_compiled_as_ever(tmp_path: Path) -> None:
    program = tmp_path / "program.py"  # TorchScript reads the source
    program.write_text(COMPILED)
    command = [sys.executable, "-W", "ignore", str(program)]
    done = subprocess.run(command, check=False, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": ROOT})
    assert (done.returncode, done.stdout) == (0, "4.0\n"), done.stderr


def test_a_rank_that_evaluates_while_the_others_wait_is_named_with_that() -> None:
    steps = {
        rank: StepSample(steps=20, seconds=0.1, communication=share, evaluation=part)
        for rank, share, part in ((0, 0.0, 0.6), (1, 0.6, 0.0))
    }
    assert "waiting for rank 0 (it evaluates, and works 40.0 ms, the others 40.0 ms)" in explain(steps)
