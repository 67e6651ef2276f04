"""How long a rank's collectives may wait while the user types on another rank."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from nbdist.train.collective import participants
from nbdist.worker.groups.timeouts import Timeouts
from tests.support.group_of_one import group_of_one

pytestmark = pytest.mark.torch_private

GIVEN = timedelta(seconds=20)


@pytest.fixture(autouse=True)
def group() -> Iterator[None]:
    with group_of_one(timeout=GIVEN):
        yield


def limit() -> timedelta:
    """How long a collective that starts now may wait."""
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))  # type: ignore[union-attr]
    found: timedelta = backend.options._timeout
    return found


def begin(timeouts: Timeouts, serial: int) -> None:
    """Begin a cell on both ranks."""
    participants.begin([0, 1])
    timeouts.begin(serial)


def test_there_is_no_limit_from_the_prompt_to_the_end_of_the_cell() -> None:
    timeouts = Timeouts()
    begin(timeouts, 1)
    assert limit() == GIVEN and not participants.has_no_limit()
    timeouts.suspend(1)
    assert limit() > timedelta(days=30) and participants.has_no_limit()
    timeouts.resume()
    assert limit() == GIVEN


def test_a_prompt_that_comes_before_this_rank_has_begun_the_cell_counts_from_its_beginning() -> None:
    timeouts = Timeouts()
    timeouts.suspend(1)
    assert limit() == GIVEN
    begin(timeouts, 1)
    assert limit() > timedelta(days=30) and participants.has_no_limit()
    timeouts.resume()
    assert limit() == GIVEN


def test_a_prompt_of_a_cell_that_has_ended_here_changes_nothing() -> None:
    timeouts = Timeouts()
    begin(timeouts, 1)
    timeouts.resume()
    timeouts.suspend(1)
    assert limit() == GIVEN
    begin(timeouts, 2)
    assert limit() == GIVEN and not participants.has_no_limit()


def test_a_second_prompt_keeps_the_limit_that_was_given() -> None:
    timeouts = Timeouts()
    begin(timeouts, 1)
    timeouts.suspend(1)
    timeouts.suspend(1)
    timeouts.resume()
    assert limit() == GIVEN
