"""What measuring training steps adds to each of them, and what the one step takes in which FLOPs are counted."""

from __future__ import annotations

import time
from collections.abc import Callable

import _tools
import torch

STEPS = _tools.size(100, 5)  # of one measurement
ROUNDS, COUNTED_ROUNDS = 40, 20
WARM_UP = _tools.size(600, 20)  # steps: each hook is at its dearest in a cell's first ones
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
    for _ in range(WARM_UP):  # among them the one that is counted
        step()
    samples = _tools.rounds(ROUNDS, {"bare": lambda: _seconds(step), "measured": measured}, warm_up=1)
    once = _tools.rounds(COUNTED_ROUNDS, {"bare": lambda: _seconds(step), "counted": counted, "sampled": sampled})
    added = [(more - less) * 1e6 for more, less in zip(samples["measured"], samples["bare"], strict=True)]
    _tools.header("processor time of a step of a small GPT, AdamW, one thread")
    _tools.row("bare", samples["bare"])
    _tools.row("measured", samples["measured"], over=("a bare step", samples["bare"]))
    _tools.row("  hooks on steps, backward passes and loaders", added, "µs", **_tools.limit(BUDGET))
    _tools.row("counted, once for each shape", once["counted"], over=("a bare step", once["bare"]))
    _tools.row("a look at the last steps", once["sampled"])


def _seconds(step: Callable[[], None]) -> float:
    """Seconds of processor time a step."""
    began = time.thread_time()
    for _ in range(STEPS):
        step()
    return (time.thread_time() - began) / STEPS


if __name__ == "__main__":
    main()
