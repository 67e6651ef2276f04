"""Fixtures of the tests of training steps: a counter, a thread that asks as a rank's control thread does, a meter."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from nbdist.metrics.steps import StepMeter
from nbdist.plan import Plan
from nbdist.train import state
from nbdist.worker.recovery.step_stop import StepCounter
from tests.support.stepping import CELL


@pytest.fixture
def counter() -> Iterator[StepCounter]:
    """A counter with the cell CELL running."""
    counter = StepCounter()
    counter.install()
    assert counter.available
    counter.begin(CELL)
    yield counter
    counter.end(CELL)
    counter.uninstall()


@pytest.fixture
def control() -> Iterator[ThreadPoolExecutor]:
    """A thread that asks, as a rank's control thread does."""
    with ThreadPoolExecutor(1) as thread:
        yield thread


@pytest.fixture
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


@pytest.fixture
def fresh_state() -> Iterator[None]:
    """Training in this process with the default plan, of which nothing is left after each test."""
    state.begin(Plan())
    yield
    state.forget()
