"""What measuring adds to a step of 5 ms on a GPU, and whether the TFLOPS that are shown are those of the wall."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import _tools

ROUNDS = 5
STEPS = _tools.size(100, 5)  # of one measurement
STEP = 0.005  # seconds, about
LOOKS = 0.25  # seconds between two looks of a panel at its fastest
WIDTH = 4096


def main() -> None:
    device = _tools.gpu()
    _tools.prepare()
    import torch
    from torch import nn

    from nbdist.metrics.node import device as devices
    from nbdist.metrics.steps import StepMeter

    width = WIDTH if device == "cuda" else 64
    model = nn.Sequential(*[nn.Linear(width, width) for _ in range(8)]).to(device, torch.bfloat16)
    optimizer = torch.optim.SGD(model.parameters(), 1e-6)

    def synchronize() -> None:
        if device == "cuda":
            torch.cuda.synchronize()

    def step(x: torch.Tensor) -> None:
        model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    def seconds(x: torch.Tensor, count: int = STEPS) -> float:
        synchronize()
        began = time.perf_counter()
        for _ in range(count):
            step(x)
        synchronize()
        return (time.perf_counter() - began) / count

    def batch(rows: int) -> torch.Tensor:
        return torch.randn(rows, width, device=device, dtype=torch.bfloat16)

    rows = 64
    seconds(batch(rows), 3)
    while seconds(batch(rows), 5) < STEP and rows < 1 << _tools.size(16, 8):
        rows *= 2
    x = batch(rows)
    shown: list[float] = []
    meter = StepMeter()

    def measured() -> float:
        meter.start()
        try:
            seconds(x, 3)  # a counted one among them
            meter.lap()
            wall = seconds(x)
            found = meter.lap()
            if found.seconds is not None:
                shown.append(found.seconds / wall)
            return wall
        finally:
            meter.stop()

    def watched() -> float:
        with _looking(lambda: devices.look(0)):
            return measured()

    samples = _tools.rounds(ROUNDS, {"bare": lambda: seconds(x), "measured": measured, "watched": watched}, warm_up=1)
    _tools.header(f"a step of 8 linear layers {width} wide, {rows} rows, bf16")
    _tools.row("bare", samples["bare"])
    _tools.row("measured", samples["measured"], over=("a bare step", samples["bare"]), at_most=1.01)
    _tools.row("measured, and looked at 4 times a second", samples["watched"], over=("a bare step", samples["bare"]))
    _tools.row("time of a step that is shown, in % of the wall", [100 * each for each in shown], "%")
    flops = 6 * 8 * rows * width * width
    _tools.row("TFLOPS by the wall", [flops / each / 1e12 for each in samples["measured"]], "TFLOPS")


@contextmanager
def _looking(look: Callable[[], object]) -> Iterator[None]:
    """A thread that looks at this process now and then, as a rank's control thread does for a panel."""
    ended = threading.Event()

    def work() -> None:
        while not ended.wait(LOOKS):
            look()

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


if __name__ == "__main__":
    main()
