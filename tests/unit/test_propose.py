"""What memory a proposal reckons with on a GPU, with stand-ins for what only CUDA can tell."""

from __future__ import annotations

import pytest
import torch

from nbdist.train.estimate.estimate import outside_torch
from nbdist.train.estimate.propose import memory_of_device

GIB = 1 << 30
OUTSIDE = outside_torch(2)


def tell(monkeypatch: pytest.MonkeyPatch, free: int, whole: int, reserved: int) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (free, whole))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: reserved)


def test_what_other_processes_hold_is_not_there_for_a_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    tell(monkeypatch, free=50 * GIB, whole=80 * GIB, reserved=10 * GIB)
    assert memory_of_device(2, 1) == (60 * GIB + OUTSIDE, 20 * GIB - OUTSIDE)


def test_what_the_ranks_hold_themselves_is_there_for_a_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    tell(monkeypatch, free=60 * GIB - 2 * OUTSIDE, whole=80 * GIB, reserved=10 * GIB)
    assert memory_of_device(2, 2) == (40 * GIB, 0)
