"""What measuring training steps adds to each of them, and what the one step takes in which FLOPs are counted."""

from __future__ import annotations

import time
from collections.abc import Callable

import _tools
import torch

STEPS = 16  # of one measurement
ROUNDS = 60
BUDGET = 500.0  # µs: 1 % of a step of 50 ms


def main() -> None:
    _tools.prepare()
    from nbdist.metrics.compute.counting import Counting
    from nbdist.metrics.steps import StepMeter
    from testbed.closed_forms import Gpt, indices

    torch.set_num_threads(1)
    model, ids = Gpt(layers=4), indices(2, 16)
    optimizer = torch.optim.AdamW(model.parameters())
    meter = StepMeter()

    def step() -> None:
        torch.nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()

    def measured() -> float:
        meter.start()
        try:
            return _seconds(step)
        finally:
            meter.stop()

    def counted() -> float:
        began = time.thread_time()
        with Counting(eagerly=False):
            step()
        return time.thread_time() - began

    def sampled() -> float:
        began = time.thread_time()
        meter.sample()
        return time.thread_time() - began

    meter.start()
    for _ in range(3 * STEPS):  # among them the one that is counted
        step()
    sides = {"bare": lambda: _seconds(step), "measured": measured, "counted": counted, "sampled": sampled}
    samples = _tools.rounds(ROUNDS, sides, warm_up=5)
    added = [(more - less) * 1e6 for more, less in zip(samples["measured"], samples["bare"], strict=True)]
    _tools.header("processor time of a step of a small GPT, AdamW, one thread")
    _tools.row("bare", samples["bare"])
    _tools.row("measured", samples["measured"], over=("a bare step", samples["bare"]))
    _tools.row("  hooks on steps, backward passes and loaders", added, "µs", **_tools.limit(BUDGET))
    _tools.row("counted, once for each shape", samples["counted"], over=("a bare step", samples["bare"]))
    _tools.row("a look at the last steps", samples["sampled"])


def _seconds(step: Callable[[], None]) -> float:
    """Seconds of processor time a step."""
    began = time.thread_time()
    for _ in range(STEPS):
        step()
    return (time.thread_time() - began) / STEPS


if __name__ == "__main__":
    main()
