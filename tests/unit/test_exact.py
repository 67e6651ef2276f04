"""Buffers and random state of a lost step go back to where the last optimizer step had left them."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from nbdist.worker.recovery.exact import ExactState


@pytest.fixture
def model() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))


def buffers(model: torch.nn.Module) -> list[torch.Tensor]:
    return [buffer.clone() for buffer in model.buffers()]


def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.randn(8, 4)).sum().backward()
    optimizer.step()


def test_statistics_go_back_to_the_end_of_the_last_step(model: torch.nn.Module) -> None:
    optimizer, state = torch.optim.SGD(model.parameters(), 0.1), ExactState()
    state.begin()
    step(model, optimizer)
    state.snapshot(optimizer)
    expected = buffers(model)
    model(torch.randn(8, 4))
    assert state.restore() == ["buffers and random state of the lost step restored"]
    assert all(map(torch.equal, buffers(model), expected))


def test_a_first_step_that_is_lost_goes_back_to_the_beginning_of_the_cell(model: torch.nn.Module) -> None:
    state, expected = ExactState(), buffers(model)
    state.begin()
    model(torch.randn(8, 4))
    state.restore()
    assert all(map(torch.equal, buffers(model), expected))


def test_a_model_that_the_cell_has_made_is_found_at_its_first_step() -> None:
    state = ExactState()
    state.begin()
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    step(model, optimizer)
    state.snapshot(optimizer)
    expected = buffers(model)
    model(torch.randn(8, 4))
    state.restore()
    assert all(map(torch.equal, buffers(model), expected))


def test_a_buffer_that_was_replaced_goes_back(model: torch.nn.Module) -> None:
    model.register_buffer("window", torch.zeros(2))
    state = ExactState()
    state.begin()
    model.window = torch.ones(3)
    state.restore()
    assert model.window.tolist() == [0.0, 0.0]


def test_a_buffer_that_holds_nan_goes_back(model: Any) -> None:
    model.register_buffer("window", torch.tensor([float("nan"), 1.0]))
    state = ExactState()
    state.begin()
    model.window[1] = 2.0
    state.restore()
    assert model.window[0].isnan() and model.window[1] == 1.0


def test_the_lost_step_draws_the_same_numbers_again() -> None:
    def draw() -> list[float]:
        return [random.random(), np.random.random(), torch.rand(1).item()]

    state = ExactState()
    state.begin()
    drawn = draw()
    assert state.restore() == ["random state of the lost step restored"]
    assert draw() == drawn


def test_models_are_not_kept_alive(model: torch.nn.Module) -> None:
    state, gone = ExactState(), torch.nn.BatchNorm1d(2)
    state.begin()
    del gone
    assert state.restore() == ["random state of the lost step restored"]


def test_nothing_is_restored_before_anything_was_kept() -> None:
    assert ExactState().restore() == []


def test_a_copy_that_does_not_fit_into_memory_costs_the_exactness_and_not_the_cell(
    model: torch.nn.Module, capsys: pytest.CaptureFixture[str]
) -> None:
    class TooLarge(torch.Tensor):
        @classmethod
        def __torch_function__(cls, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            if function is torch.Tensor.clone:
                raise MemoryError("no room for 80 GiB")
            return super().__torch_function__(function, types, args, kwargs)  # type: ignore[no-untyped-call]

    optimizer, state = torch.optim.SGD(model.parameters(), 0.1), ExactState()
    model.register_buffer("large", torch.zeros(3).as_subclass(TooLarge))
    state.begin()
    step(model, optimizer)
    state.snapshot(optimizer)
    assert state.restore() == []
    assert capsys.readouterr().err.count("`--exact` could not copy") == 1
    del model.large
    state.begin()
    assert state.restore() != []


def test_models_without_data_are_passed_over(model: torch.nn.Module) -> None:
    with FakeTensorMode():
        fake = torch.nn.BatchNorm1d(8)
    meta = torch.nn.BatchNorm1d(8, device="meta")
    state, expected = ExactState(), buffers(model)
    state.begin()
    model(torch.randn(8, 4))
    assert state.restore() == ["buffers and random state of the lost step restored"]
    assert all(map(torch.equal, buffers(model), expected))
    assert fake.running_mean is not None and meta.running_mean is not None  # they were there
