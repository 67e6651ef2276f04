"""Loops whose training steps are measured, and what they are measured with."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD
from torch.utils.data import DataLoader

from nbdist.metrics.compute.counting import bears_compiled_code
from nbdist.metrics.node.sample import StepSample
from nbdist.metrics.steps import StepMeter
from testbed.closed_forms import indices, loss_of

B, T = 2, 16  # sequences of a batch, and tokens of each

beside_compiled = pytest.mark.skipif(
    not bears_compiled_code(), reason="modes of this torch switch compiled code off, so it is not counted"
)


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


def one_ahead(loader: DataLoader[tuple[Tensor, ...]]) -> Iterator[tuple[Tensor, ...]]:
    """Take each batch before the one that it follows is used, as Accelerate does: it says which one is the last."""
    batches = iter(loader)
    batch = next(batches)
    for following in batches:
        yield batch
        batch = following
    yield batch


class Clock:
    """Time that passes when a test says so."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr(time, "perf_counter", lambda: self.now)
        monkeypatch.setattr(time, "monotonic", lambda: self.now)
