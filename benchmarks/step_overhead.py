"""What the loop's helpers add to a training step written by hand: `accumulate`, `backward`, and the steps' shadows."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import _tools
import torch
import torch.distributed as dist
from torch import nn

MICRO_BATCHES = _tools.size(16, 4)  # of one measurement: short, so that both sides of a round see the same machine
ROUNDS = 40
STEP = 0.050  # s, the step that the budget is a part of
BUDGET = 0.01
BLOCKS = 12

Loop = Callable[[], None]


def main() -> None:
    _tools.prepare()
    torch.set_num_threads(1)
    os.environ |= {"MASTER_ADDR": "localhost", "RANK": "0", "WORLD_SIZE": "1"}
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    _tools.header("processor time of a micro-batch of a tiny model")
    for strategy, window in (("none", 1), ("none", 4), ("fsdp", 1), ("fsdp", 4)):
        _compare(strategy, window)
    dist.destroy_process_group()


def _compare(strategy: str, window: int) -> None:
    by_hand, prepared = _by_hand(strategy, window), _prepared(strategy, window)
    measures = {"by hand": lambda: _seconds(by_hand), "prepared": lambda: _seconds(prepared)}
    samples = _tools.rounds(ROUNDS, measures, warm_up=5)
    added = [more - less for more, less in zip(samples["prepared"], samples["by hand"], strict=True)]
    print(f"{strategy}, windows of {window}")
    _tools.row("  by hand", samples["by hand"])
    _tools.row("  prepared", samples["prepared"])
    _tools.row("  added, of 1 % of a step of 50 ms", added, over=("the budget", STEP * BUDGET), at_most=1.0)


def _model() -> nn.Module:
    blocks = [nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8)) for _ in range(BLOCKS)]
    return nn.Sequential(*blocks, nn.Linear(8, 1))


def _parts(model: nn.Module) -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
    optimizer = torch.optim.AdamW(model.parameters())
    return optimizer, torch.optim.lr_scheduler.ConstantLR(optimizer)


def _by_hand(strategy: str, window: int) -> Loop:
    model: Any = _model()
    if strategy == "fsdp":
        from torch.distributed.fsdp import fully_shard

        for block in list(model)[:BLOCKS]:
            fully_shard(block)
        fully_shard(model)
    optimizer, scheduler = _parts(model)
    batch = torch.ones(2, 8)

    def loop() -> None:
        for number in range(1, MICRO_BATCHES + 1):
            last = number % window == 0
            if strategy == "fsdp" and window > 1:
                model.set_requires_gradient_sync(last)
            loss = model(batch).square().mean()
            (loss / window if window > 1 else loss).backward()
            if last:
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()

    return loop


def _prepared(strategy: str, window: int) -> Loop:
    import nbdist

    model = _model()
    optimizer, scheduler = _parts(model)
    settings: dict[str, Any] = {"strategy": strategy, "accumulate": window}
    model, optimizer, scheduler = nbdist.prepare(model, optimizer, scheduler, plan=nbdist.Plan(**settings))
    batch = torch.ones(2, 8)

    def loop() -> None:
        for _ in range(MICRO_BATCHES):
            with nbdist.accumulate(model):
                loss = model(batch).square().mean()
                nbdist.backward(loss)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()

    return loop


def _seconds(loop: Loop) -> float:
    """Seconds of processor time a micro-batch."""
    began = time.process_time()
    loop()
    return (time.process_time() - began) / MICRO_BATCHES


if __name__ == "__main__":
    main()
