"""Fixtures of the tests of training steps: a counter, and a thread that asks as a rank's control thread does."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

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
