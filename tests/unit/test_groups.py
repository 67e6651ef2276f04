"""How a rank gets into its first group on GPUs."""

from __future__ import annotations

import pytest
import torch

from nbdist.wire.life import StartOptions
from nbdist.wire.rank_processes import RankSetup, StoreAddress
from nbdist.worker.groups import join


def setup(count: int, gpus: int, rank: int = 0) -> RankSetup:
    options = StartOptions(count, {}, "/", [], [], 0o022, 1024, gpus=[str(gpu) for gpu in range(gpus)])
    return RankSetup(1, rank, "", b"", b"", b"", b"", StoreAddress(), 1, options, gpu=rank)


@pytest.fixture(autouse=True)
def cuda_build(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)


def test_a_rank_with_a_gpu_of_its_own_connects_it_at_once() -> None:
    assert join.bound_device(setup(2, 2, rank=1), "cpu:gloo,cuda:nccl") == torch.device("cuda", 1)


def test_ranks_that_share_a_gpu_do_not_connect_it() -> None:
    assert join.bound_device(setup(2, 1, rank=1), "cpu:gloo,cuda:nccl") is None


def test_gloo_connects_no_gpu() -> None:
    assert join.bound_device(setup(2, 2), "gloo") is None
