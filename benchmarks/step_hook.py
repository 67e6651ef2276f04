"""What counting steps, so that ranks can be stopped between two, adds to each step of an optimizer."""

from __future__ import annotations

import time

import _tools
import torch

STEPS = _tools.size(100, 5)  # of one measurement: short, so that both sides of a round see the same machine
ROUNDS = 400
BUDGET = 5.0  # µs


def main() -> None:
    _tools.prepare()
    from torch.optim.optimizer import register_optimizer_step_post_hook

    from nbdist.serving.served_rank import ServedRank
    from nbdist.worker.recovery.step_stop import StepCounter

    torch.set_num_threads(1)
    optimizer = _sgd()
    counter = StepCounter()

    def counted() -> float:
        counter.install()
        counter.begin(1)
        try:
            return _seconds(optimizer)
        finally:
            counter.end(1)
            counter.uninstall()

    def served() -> float:
        hook = register_optimizer_step_post_hook(ServedRank().step_made)
        try:
            return _seconds(optimizer)
        finally:
            hook.remove()

    measures = {"bare": lambda: _seconds(optimizer), "counted": counted, "served": served}
    samples = _tools.rounds(ROUNDS, measures, warm_up=20)

    def added(name: str) -> list[float]:
        return [(more - less) * 1e6 for more, less in zip(samples[name], samples["bare"], strict=True)]

    _tools.header("processor time of a step of plain SGD, one tensor")
    _tools.row("bare", samples["bare"])
    _tools.row("counted", samples["counted"], over=("a bare step", samples["bare"]))
    _tools.row("  both hooks", added("counted"), "µs", **_tools.limit(BUDGET))
    _tools.row("in a job that answers looks", samples["served"], over=("a bare step", samples["bare"]))
    _tools.row("  its hook", added("served"), "µs", **_tools.limit(BUDGET))


def _sgd() -> torch.optim.Optimizer:
    weight = torch.nn.Parameter(torch.zeros(4))
    weight.grad = torch.ones(4)
    return torch.optim.SGD([weight])


def _seconds(optimizer: torch.optim.Optimizer) -> float:
    """Seconds of processor time a step."""
    began = time.thread_time()
    for _ in range(STEPS):
        optimizer.step()
    return (time.thread_time() - began) / STEPS


if __name__ == "__main__":
    main()
