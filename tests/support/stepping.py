"""What the tests of training steps share: a cell, a parameter that can step, a request to stop."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from nbdist.worker.recovery.step_stop import StepCounter

CELL = 7  # a serial number
MANY = 10_000  # steps: more than any cell here makes
LIMIT = 30.0  # seconds, after which something hangs

Step = Callable[[], object]
Log = list[str]


def parameter() -> nn.Parameter:
    made = nn.Parameter(torch.ones(4))
    made.grad = torch.ones(4)
    return made


def ask(counter: StepCounter, target: int, serial: int = CELL) -> None:
    counter.arm(serial)
    counter.aim(serial, target)
