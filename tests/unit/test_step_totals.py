"""What steps take of which only some were counted."""

from __future__ import annotations

import pytest
import torch

from nbdist.metrics.compute.counting import FlopCount
from nbdist.metrics.compute.live import Known, Shape
from nbdist.metrics.step_totals import TimedStep, Totals

SHORT = Known(FlopCount(100, 100), {}, torch.device("cpu"))


def step(optimizer: int, passes: str, seconds: float) -> TimedStep:
    found = TimedStep()
    found.shape, found.seconds = Shape(optimizer, (passes,), frozenset()), seconds
    return found


COUNTED = step(1, "short", 1.0)
KNOWN = {COUNTED.shape: SHORT}


def test_steps_of_a_new_optimizer_that_look_like_counted_ones_take_as_much() -> None:
    found = Totals().with_steps([COUNTED, step(2, "short", 3.0)], KNOWN).sample(2)
    assert (found.flops, found.uncounted) == (100, 0.5)


def test_steps_of_another_look_do_as_much_in_a_second() -> None:
    found = Totals().with_steps([COUNTED, step(1, "long", 3.0)], KNOWN).sample(2)
    assert found.flops == pytest.approx(200) and found.uncounted == 0.5


def test_a_step_that_was_counted_counts_with_its_own_figures_whatever_others_look_like() -> None:
    other = step(2, "short", 1.0)
    found = Totals().with_steps([COUNTED, other], {**KNOWN, other.shape: Known(FlopCount(300, 300), {}, SHORT.device)})
    assert (found.sample(2).flops, found.sample(2).uncounted) == (200, 0.0)
