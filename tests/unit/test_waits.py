"""Which rank the others wait for: the one that waits least, with steps that all take as long."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from nbdist.metrics.node.sample import RankSample, Sample, StepSample
from nbdist.metrics.node.step_shares import late_rank, parts_of
from nbdist.metrics.steps import StepMeter
from nbdist.panel.model import view_of
from nbdist.worker.recovery.reset_models import let_groups_outlive_ddp

pytestmark = pytest.mark.torch_private

LATE, LATER_BY = 1, 0.05  # a rank that has more work than the others, and how many seconds of it
STALL_EVERY, STALL = 10, 0.2  # steps, and seconds that such a rank then takes for something else


def plain(model: nn.Module) -> nn.Module:
    """Whose gradients are summed by hand."""

    def reduce(parameter: nn.Parameter) -> None:
        dist.all_reduce(parameter.grad)

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(reduce)
    return model


WAYS: dict[str, Callable[[nn.Module], Any]] = {"DDP": DistributedDataParallel, "FSDP2": fully_shard, "plain": plain}


def in_each_step(step: int) -> float:
    return LATER_BY


def now_and_then(step: int) -> float:
    """As one that writes checkpoints or draws plots."""
    return STALL if step % STALL_EVERY == STALL_EVERY - 1 else 0.0


def be_rank(rank: int, port: int, way: str, steps: int, later_by: Callable[[int], float], results: Any) -> None:
    torch.set_num_threads(1)
    let_groups_outlive_ddp()  # the model is freed at the end of this function
    store = dist.TCPStore("127.0.0.1", port)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    with StepMeter() as meter:
        model = WAYS[way](nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 8)))
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        for step in range(steps):
            time.sleep(later_by(step) if rank == LATE else 0.0)  # work, which others have less of
            model(torch.randn(8, 64)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        results.put((rank, meter.lap()))
    dist.barrier()
    dist.destroy_process_group()


def steps_of_ranks(way: str, steps: int, later_by: Callable[[int], float]) -> dict[int, StepSample]:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    context = mp.get_context("spawn")
    results = context.Queue()
    arguments = (store.port, way, steps, later_by, results)
    mp.start_processes(be_rank, arguments, nprocs=2, start_method="spawn")
    return dict(results.get(timeout=30) for _ in range(2))


@pytest.mark.parametrize("way", WAYS)
def test_the_rank_that_the_others_wait_for_is_found(way: str) -> None:
    steps = steps_of_ranks(way, 20, in_each_step)
    assert all(step.communication is not None for step in steps.values())
    view = view_of(Sample(at=0.0, ranks=[RankSample(rank, state="busy", step=steps[rank]) for rank in (0, 1)]))
    late = [row.rank for row in view.rows if any("straggler" in words for _, words in row.badges)]
    assert late == [LATE]


@pytest.mark.parametrize("way", WAYS)
def test_a_rank_that_stalls_now_and_then_is_the_one_that_the_others_wait_for(way: str) -> None:
    assert late_rank(parts_of(steps_of_ranks(way, 100, now_and_then))) == LATE
