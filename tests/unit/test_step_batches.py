"""What training steps take from DataLoaders: how much, and how long they wait for it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD
from torch.utils.data import DataLoader, TensorDataset

from nbdist.metrics.events import loading
from nbdist.metrics.steps import StepMeter
from testbed.closed_forms import Gpt, indices
from tests.support.step_loops import B, Clock, T, measured, one_ahead

pytestmark = [pytest.mark.torch_private, pytest.mark.usefixtures("one_thread")]


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


@pytest.mark.parametrize(("every", "order"), [(1, iter), (5, iter), (5, one_ahead)])
def test_a_validation_of_one_batch_with_gradients_on_is_no_part_of_a_step(
    meter: StepMeter, every: int, order: Callable[[DataLoader[tuple[Tensor, ...]]], Iterator[tuple[Tensor, ...]]]
) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    optimizer = SGD(model.parameters(), 0.01)
    for number, (inputs,) in enumerate(order(rows(1600))):
        model(inputs).sum().backward()
        optimizer.step()
        if number % every == 0:
            for (held_out,) in DataLoader(TensorDataset(torch.randn(64, 4)), batch_size=64):
                model(held_out).sum().item()
    found = meter.lap()
    assert found.units == 8
    assert found.uncounted < 0.01  # the last step of a loop that is one batch ahead takes none


def test_batches_whose_losses_are_differentiated_together_all_count(meter: StepMeter) -> None:
    model = nn.Linear(4, 2)
    optimizer = SGD(model.parameters(), 0.01)
    for (one,), (other,) in zip(rows(400), DataLoader(TensorDataset(torch.randn(800, 4)), batch_size=16), strict=True):
        loss = model(one).sum()
        (loss + model(other).sum()).backward()
        optimizer.step()
    assert meter.lap().units == 24


def units_of_a_step(meter: StepMeter, batches: Iterator[tuple[Tensor, ...]]) -> float | None:
    """Train one step on each batch, or on the batches that come together."""
    model = nn.Linear(4, 2)
    optimizer = SGD(model.parameters(), 0.01)
    for inputs, *_ in batches:
        model(inputs).sum().backward()
        optimizer.step()
    return meter.lap().units


def rows(count: int) -> DataLoader[tuple[Tensor, ...]]:
    return DataLoader(TensorDataset(torch.randn(count, 4)), batch_size=8)


def test_a_batch_that_is_fetched_ahead_belongs_to_the_step_that_works_on_it(meter: StepMeter) -> None:
    assert units_of_a_step(meter, itertools.chain(*(one_ahead(rows(40)) for _ in range(4)))) == 8


def test_batches_of_two_loaders_that_are_used_together_both_count(meter: StepMeter) -> None:
    pairs = zip(rows(80), rows(80), strict=True)
    assert units_of_a_step(meter, ((*one, *other) for one, other in pairs)) == 16


def test_a_step_on_several_batches_counts_them_all(meter: StepMeter) -> None:
    batches = iter(rows(240))
    together = ((torch.cat([inputs for (inputs,) in three]),) for three in zip(batches, batches, batches, strict=True))
    assert units_of_a_step(meter, together) == 24


def test_batches_of_tasks_that_take_turns_count_alike(meter: StepMeter) -> None:
    tasks = [iter(rows(80)) for _ in range(3)]
    assert units_of_a_step(meter, (next(tasks[number % 3]) for number in range(30))) == 8


def test_batches_that_are_fetched_together_for_several_steps_are_shared_by_them(meter: StepMeter) -> None:
    turns = zip(rows(240), rows(240), rows(240), strict=True)
    assert units_of_a_step(meter, itertools.chain.from_iterable(turns)) == pytest.approx(8, rel=0.05)


def test_a_smaller_last_batch_counts_as_what_it_holds(meter: StepMeter) -> None:
    found = units_of_a_step(meter, itertools.chain(*(rows(18) for _ in range(50))))
    assert found == pytest.approx((8 + 8 + 2) / 3, rel=0.05)  # counted steps are left out


@pytest.mark.parametrize("order", [iter, one_ahead])
def test_the_time_of_a_validation_counts_though_the_step_after_it_is_counted(
    meter: StepMeter,
    monkeypatch: pytest.MonkeyPatch,
    order: Callable[[DataLoader[tuple[Tensor, ...]]], Iterator[tuple[Tensor, ...]]],
) -> None:
    """Epochs of two steps of four batches and one of two, as a Trainer makes them."""
    clock = Clock(monkeypatch)
    model = nn.Linear(4, 2)
    optimizer = SGD(model.parameters(), 0.01)
    training, validation, ends = rows(80), rows(16), []
    for _ in range(6):
        for number, (inputs,) in enumerate(order(training), 1):
            model(inputs).sum().backward()
            clock.now += 1.0
            if number % 4 == 0 or number == 10:
                optimizer.step()
                ends.append(clock.now)
        with torch.no_grad():
            for (inputs,) in validation:
                model(inputs)
                clock.now += 10.0
    assert meter.lap().seconds == pytest.approx((ends[-1] - ends[0]) / (len(ends) - 1), rel=0.05)


@pytest.mark.parametrize("validated", ["one batch", "the training data"])
def test_batches_that_are_taken_without_gradients_are_no_part_of_a_step(meter: StepMeter, validated: str) -> None:
    model = nn.Linear(4, 2)
    optimizer = SGD(model.parameters(), 0.01)
    training = rows(80)
    validation = rows(8) if validated == "one batch" else training
    for _ in range(5):
        for (inputs,) in training:
            model(inputs).sum().backward()
            optimizer.step()
        with torch.no_grad():
            for (inputs,) in validation:
                model(inputs)
    found = meter.lap()
    assert (found.units, found.uncounted) == (8, 0)


def test_a_loop_without_gradients_has_samples_too(meter: StepMeter) -> None:
    """As where gradients are written by hand."""
    model = nn.Linear(4, 2)
    optimizer = SGD(model.parameters(), 0.01)
    with torch.no_grad():
        for (inputs,) in rows(80):
            model.weight.grad = model(inputs).T @ inputs
            optimizer.step()
    assert meter.lap().units == 8


def test_batches_of_a_check_before_training_are_no_part_of_a_step(meter: StepMeter) -> None:
    """As Lightning checks that its validation works."""
    training, validation = rows(80), rows(160)
    list(itertools.islice(validation, 2))
    model = nn.Linear(4, 2)
    optimizer = SGD(model.parameters(), 0.01)
    for _ in range(2):
        for (inputs,) in one_ahead(training):
            model(inputs).sum().backward()
            optimizer.step()
        list(validation)
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
