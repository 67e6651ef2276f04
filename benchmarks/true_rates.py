"""Whether the rates that are shown are true: FLOPs and seconds of a step in loops that are hard to measure.

Wall time includes what counting takes, which the seconds shown leave out, and which is reported beside them.
"""

from __future__ import annotations

import itertools
import random
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import _tools
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

WARM_UP = 24  # steps that are not looked at
WIDTH = 128
TOLERANCE = 0.02

Step = tuple[Callable[[], None], int]  # what it does, and its FLOPs


class Rates(NamedTuple):
    """Of one loop: FLOPs and seconds of a step, shown and true, and what is reported beside them.

    Attributes:
        uncounted: Share of steps.
        counting: Seconds a step, which counting took.
    """

    flops: float
    true_flops: float
    seconds: float
    true_seconds: float
    uncounted: float
    counting: float

    @property
    def are_true(self) -> bool:
        """Whether FLOPs and seconds are, together with what is reported beside them."""
        flops, seconds = self.flops / self.true_flops, (self.seconds + self.counting) / self.true_seconds
        return abs(seconds - 1) <= TOLERANCE and (abs(flops - 1) <= TOLERANCE or self.uncounted > 0)


def main() -> None:
    _tools.prepare()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", message="This DataLoader will create")
    print(f"{'shown / true, of a step':<44}{'FLOPs':>8}{'seconds':>9}  not counted  counting took")
    for loop in (burst, stalls, alternating, lengths, resizing, freezing, layer_drop, adversarial, skipped, compiled):
        found = _rates(loop())
        flops, seconds = found.flops / found.true_flops, found.seconds / found.true_seconds
        counting = found.counting / found.true_seconds
        shown = f"{flops:>8.3f}{seconds:>9.3f}  {found.uncounted:>11.1%}  {counting:>13.1%}"
        print(f"{(loop.__doc__ or '').rstrip('.'):<44}{shown}  {'true' if found.are_true else 'OFF'}")


def _rates(steps: Iterator[Step]) -> Rates:
    from nbdist.metrics.steps import StepMeter

    with StepMeter() as meter:
        for step, _ in itertools.islice(steps, WARM_UP):
            step()
        meter.lap()
        next(steps)[0]()  # from its end on
        began, flops, count = time.perf_counter(), 0, 0
        while time.perf_counter() - began < _tools.size(40, 2) / 10:
            step, work = next(steps)
            step()
            flops += work
            count += 1
        seconds = (time.perf_counter() - began) / count
        found = meter.lap()
    counting = found.counting / count
    return Rates(found.flops or 0.0, flops / count, found.seconds or 0.0, seconds, found.uncounted, counting)


def _layers(count: int) -> nn.Sequential:
    return nn.Sequential(*[nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(count)])


def _work(layers: int, rows: int, inputs_differentiated: bool = False) -> int:
    """FLOPs of a pass forward and backward through such layers."""
    return 2 * rows * WIDTH * WIDTH * (3 * layers - (not inputs_differentiated))


def _trained(model: nn.Module, optimizer: torch.optim.Optimizer, *inputs: Tensor) -> Callable[[], None]:
    def step() -> None:
        model(*inputs).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


class Slow(Dataset[Tensor]):
    """Items that take a while, as decoding an image does."""

    def __len__(self) -> int:
        return 8 * 4000

    def __getitem__(self, index: int) -> Tensor:
        time.sleep(0.004)
        return torch.ones(WIDTH)


def burst() -> Iterator[Step]:
    """A DataLoader with four slow workers."""
    model = _layers(4)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    for batch in DataLoader(Slow(), batch_size=8, num_workers=4):
        yield _trained(model, optimizer, batch), _work(4, 8)


def stalls() -> Iterator[Step]:
    """A stall after every fourth step."""
    model, inputs = _layers(4), torch.randn(64, WIDTH)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    for number in itertools.count(1):
        yield _trained(model, optimizer, inputs), _work(4, 64)
        time.sleep(0.05 if number % 4 == 0 else 0)


def alternating() -> Iterator[Step]:
    """Two shapes in turn."""
    model = _layers(4)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    for rows in itertools.cycle((32, 128)):
        yield _trained(model, optimizer, torch.randn(rows, WIDTH)), _work(4, rows)


class Pooled(nn.Module):
    """A deep head behind a body whose inputs have any length."""

    def __init__(self, head: int) -> None:
        super().__init__()
        self.body, self.head = _layers(3), _layers(head)

    def forward(self, inputs: Tensor) -> Tensor:
        pooled: Tensor = self.head(self.body(inputs).mean(1))
        return pooled


def lengths() -> Iterator[Step]:
    """Four lengths behind a deep head."""
    model = Pooled(20)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    for length in itertools.cycle((64, 8, 32, 16)):
        yield _trained(model, optimizer, torch.randn(8, length, WIDTH)), _work(3, 8 * length) + _work(20, 8, True)


def resizing() -> Iterator[Step]:
    """Inputs that grow behind a deep head."""
    model = Pooled(12)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    for number in itertools.count():
        length = 8 if number < WARM_UP + 30 else 64
        yield _trained(model, optimizer, torch.randn(8, length, WIDTH)), _work(3, 8 * length) + _work(12, 8, True)


def freezing() -> Iterator[Step]:
    """Most layers are frozen on the way."""
    model, inputs = _layers(30), torch.randn(64, WIDTH)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    for number in itertools.count():
        if number == WARM_UP + 30:
            model[:20].requires_grad_(False)
        frozen = 2 * 64 * WIDTH * WIDTH * 20 + _work(10, 64)
        yield _trained(model, optimizer, inputs), frozen if number >= WARM_UP + 30 else _work(30, 64)


def layer_drop() -> Iterator[Step]:
    """Layers that are dropped by chance."""
    chance = random.Random(0)
    blocks, head, inputs = _layers(4), _layers(12), torch.randn(64, WIDTH)
    optimizer = torch.optim.SGD([*blocks.parameters(), *head.parameters()], 0.01)
    while True:
        kept = [block for block in blocks if chance.random() < 0.5]
        yield _trained(nn.Sequential(*kept, *head), optimizer, inputs), _work(len(kept) + 12, 64)


def adversarial() -> Iterator[Step]:
    """A generator and a discriminator in turn."""
    generator, discriminator, inputs = _layers(4), _layers(6), torch.randn(64, WIDTH)
    ours, theirs = (torch.optim.Adam(model.parameters()) for model in (generator, discriminator))

    def judge() -> None:
        with torch.no_grad():
            made = generator(inputs)
        discriminator(made).mean().backward()
        theirs.step()
        theirs.zero_grad()

    def make() -> None:
        (-discriminator(generator(inputs)).mean()).backward()
        ours.step()
        ours.zero_grad()
        discriminator.zero_grad()

    while True:
        yield judge, 2 * 64 * WIDTH * WIDTH * 4 + _work(6, 64)
        yield make, _work(10, 64)


def skipped() -> Iterator[Step]:
    """Every third step accumulates a second pass."""
    model, inputs = _layers(6), torch.randn(64, WIDTH)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    once = _trained(model, optimizer, inputs)

    def twice() -> None:
        model(inputs).square().mean().backward()
        once()

    for number in itertools.count():
        yield (twice, 2 * _work(6, 64)) if number % 3 == 2 else (once, _work(6, 64))


def compiled() -> Iterator[Step]:
    """Compiled layers, with dropout."""
    model: Any = nn.Sequential(_layers(4), nn.Dropout(0.1), _layers(1))
    torch._dynamo.reset()
    model.compile(backend="aot_eager")
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    inputs = torch.randn(64, WIDTH)

    def step() -> None:
        F.mse_loss(model(inputs), inputs).backward()
        optimizer.step()
        optimizer.zero_grad()

    while True:
        yield step, _work(5, 64)


if __name__ == "__main__":
    main()
