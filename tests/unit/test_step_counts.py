"""What training steps compute, counted as they run: each shape once, exactly, and nothing else."""

from __future__ import annotations

import contextlib
import math
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD
from torch.utils.data import DataLoader, TensorDataset

from nbdist.client.costs.cell_steps import render
from nbdist.metrics.compute import live
from nbdist.metrics.steps import StepMeter
from testbed.closed_forms import Gpt, Graphs, gpt, gpt_blocks, gpt_scores_again, indices, loss_of
from tests.support.step_loops import B, Clock, T, beside_compiled, measured, one_ahead, train

pytestmark = [pytest.mark.torch_private, pytest.mark.usefixtures("one_thread")]


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


def trained_in(clock: Clock, *rows: int) -> list[int]:
    """Steps of a layer, of a second for each four rows; returns FLOPs of each."""
    model = torch.nn.Linear(16, 16)
    optimizer = SGD(model.parameters(), 0.01)
    for count in rows:
        model(torch.ones(count, 16)).sum().backward()
        clock.now += count / 4
        optimizer.step()
    return [2 * 2 * count * 16 * 16 for count in rows]


def test_steps_of_a_shape_that_was_not_counted_are_taken_to_be_as_fast_and_the_rate_is_marked(
    meter: StepMeter, monkeypatch: pytest.MonkeyPatch
) -> None:
    flops = trained_in(Clock(monkeypatch), *[8] * 8, 24)[1:]
    found = meter.lap()
    assert found.uncounted == pytest.approx(1 / 8)
    assert found.flops == pytest.approx(sum(flops) / len(flops))
    shown = " ".join(render({0: found}).split())
    assert "about" in shown and "12 % of the steps have shapes that were not counted" in shown


@pytest.mark.parametrize("rows", [(8, 64), (8, 32, 64)])
def test_few_steps_of_shapes_that_take_turns_count_in_equal_shares(
    meter: StepMeter, monkeypatch: pytest.MonkeyPatch, rows: tuple[int, ...]
) -> None:
    clock, lap = Clock(monkeypatch), rows * 6
    for _ in range(2):
        flops = trained_in(clock, *lap)[1:]
        found = meter.lap()
        assert (found.timed, found.uncounted) == (len(lap) - 1, 0), found
        assert found.flops == pytest.approx(sum(flops) / len(flops))
        assert found.seconds == pytest.approx(sum(lap[1:]) / 4 / len(flops))


def test_lengths_at_random_have_the_rate_that_they_had(meter: StepMeter, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, lengths = Clock(monkeypatch), random.Random(0)
    for _ in range(3):
        lap = [lengths.choice((8, 16, 32, 48, 64)) for _ in range(40)]
        flops = trained_in(clock, *lap)[1:]
        found = meter.lap()
        assert found.flops is not None and found.seconds is not None
        assert found.flops / found.seconds == pytest.approx(sum(flops) / (sum(lap[1:]) / 4), rel=0.02)


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


@pytest.mark.parametrize("order", [iter, one_ahead])
@pytest.mark.parametrize("batches", [10, 162])
def test_a_smaller_last_accumulation_of_each_epoch_is_counted_when_it_comes_again_though_its_batches_are_alike(
    meter: StepMeter, batches: int, order: Callable[[DataLoader[tuple[Tensor, ...]]], Iterator[tuple[Tensor, ...]]]
) -> None:
    model = nn.Linear(64, 64)
    optimizer = SGD(model.parameters(), 0.01)
    loader = DataLoader(TensorDataset(torch.randn(8 * batches, 64)), batch_size=8)
    counted = 0
    for _ in range(5):
        for number, (inputs,) in enumerate(order(loader), 1):
            model(inputs).sum().backward()
            if number % 4 == 0 or number == batches:
                counted += torch._C._len_torch_dispatch_stack()
                optimizer.step()
                optimizer.zero_grad()
    assert meter.lap().uncounted == 0
    assert counted <= 4  # two shapes, each once, or once more


def test_depths_that_vary_at_random_are_all_counted_though_their_batches_are_alike(
    meter: StepMeter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live, "FREE_SECONDS", math.inf)  # counts are few, but on a busy machine each may take long
    layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(12))
    optimizer = SGD(layers.parameters(), 0.01)
    chance = random.Random(2)
    for (batch,) in DataLoader(TensorDataset(torch.randn(16 * 600, 64)), batch_size=16):
        hidden = batch
        for layer in layers[: 12 if chance.random() < 0.8 else chance.randrange(6, 12)]:
            hidden = layer(hidden).relu()
        hidden.sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert meter.lap().uncounted == 0


def test_inputs_that_grow_behind_a_deep_head_are_seen_at_once_in_steps_that_take_long(
    meter: StepMeter, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, body, head = Clock(monkeypatch), nn.Linear(8, 8), nn.Sequential(*[nn.Linear(8, 8) for _ in range(12)])
    optimizer = SGD([*body.parameters(), *head.parameters()], 0.01)

    def steps(count: int, rows: int) -> None:
        for _ in range(count):
            head(body(torch.ones(rows, 8)).mean(0)).sum().backward()
            clock.now += 1.0
            optimizer.step()

    steps(40, rows=4)
    small = meter.sample().flops
    steps(8, rows=400)
    found = meter.lap()
    assert small is not None and found.flops is not None and found.flops > small
    assert found.uncounted <= 2 / found.timed


def test_an_operation_that_raises_in_a_counted_step_is_named_as_the_reason(meter: StepMeter) -> None:
    model = Gpt()
    optimizer = SGD(model.parameters(), 0.01)
    for _ in range(4):
        with contextlib.suppress(RuntimeError):
            torch.ones(2) @ torch.ones(3)
        train(model, optimizer, (B, T))
    found = meter.lap()
    assert found.flops is None and "RuntimeError: inconsistent tensor size" in found.why


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
