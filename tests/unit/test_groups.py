"""How a rank gets into its first group on GPUs."""

from __future__ import annotations

import pytest
import torch

from nbdist.wire.messages.life import StartOptions
from nbdist.wire.messages.rank_processes import RankSetup, StoreAddress
from nbdist.worker.groups import join


def setup(count: int, gpus: int | list[str], rank: int = 0) -> RankSetup:
    names = [str(gpu) for gpu in range(gpus)] if isinstance(gpus, int) else gpus
    options = StartOptions(count, {}, "/", [], [], 0o022, 1024, gpus=names)
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


@pytest.mark.parametrize(("rank", "shown"), [(0, "MIG-a"), (1, "MIG-b"), (2, "MIG-a")])
def test_a_rank_on_a_mig_instance_sees_that_one_only(rank: int, shown: str) -> None:
    """CUDA shows a process one instance at most, so that any other number is an invalid device ordinal."""
    own = setup(3, ["MIG-a", "MIG-b"], rank)
    assert join.environment(own)["CUDA_VISIBLE_DEVICES"] == shown
    assert own.gpu % len(own.gpus_shown) == 0


@pytest.mark.parametrize(
    ("gpus", "backend"),
    [(["0", "1"], "cpu:gloo,cuda:nccl"), (["0"], "gloo"), (["MIG-a", "MIG-b"], "gloo"), ([], "gloo")],
)
def test_nccl_is_the_usual_backend_only_where_it_knows_the_ranks_gpus_apart(gpus: list[str], backend: str) -> None:
    assert join.backend_for(setup(2, gpus).options, len(gpus)) == backend
    assert setup(2, gpus).options.usual_backend == backend
