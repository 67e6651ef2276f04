"""Training on a GPU: it equals one process's, skips what is infinite, and holds no more memory from epoch to epoch."""

from __future__ import annotations

import pytest

import nbdist
from tests.gpu.conftest import Record, value, values

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_two_ranks_train_in_bf16(two: nbdist.Session, strategy: str) -> None:
    assert value(two, f"programs.trains(strategy={strategy!r}, precision='bf16')") == (True, True)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_two_ranks_on_nccl_train_in_bf16(nccl: nbdist.Session, strategy: str) -> None:
    assert value(nccl, f"programs.trains(strategy={strategy!r}, precision='bf16')", timeout=45) == (True, True)


@pytest.mark.parametrize("strategy", ["none", "ddp", "fsdp"])
def test_ranks_train_as_one_process_does(pair: nbdist.Session, strategy: str) -> None:
    for accumulate, clip in ((1, False), (3, True)):
        code = (
            f"from tests.support import train_equality as equality\n"
            f"plan = equality.plan_of({strategy!r}, {accumulate}, {clip})\n"
            f"equality.distance_from_one_process(plan, 'float64')"
        )
        assert max(values(pair, code)) < 1e-9


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_bf16_is_bit_for_bit_that_of_pytorch_s_own_recipe(pair: nbdist.Session, strategy: str) -> None:
    code = (
        "from tests.support import train_equality as equality\n"
        f"equality.differing_from_recipe(equality.plan_of({strategy!r}, 2, True, 'bf16'))"
    )
    assert value(pair, code) == []


def test_an_epoch_more_takes_no_more_memory(pair: nbdist.Session, record_property: Record) -> None:
    found = values(pair, "programs.reserved_by_epoch()")
    record_property("MiB reserved by epoch", found[0][0])
    for reserved, right in found:
        assert right and reserved[-1] <= reserved[2]


@pytest.mark.parametrize("fused", [False, True], ids=["plain", "fused"])
def test_ddp_in_fp16_skips_a_step_that_is_infinite_on_one_rank(pair: nbdist.Session, fused: bool) -> None:
    assert values(pair, f"programs.skips_infinite_steps('ddp', {fused})") == [(1, True, True)] * 2


def test_fsdp_in_fp16_skips_a_step_that_is_infinite_on_one_rank(pair: nbdist.Session) -> None:
    if value(pair, "device.type") == "cpu":
        pytest.skip("fp16 with fsdp needs a GPU")
    assert values(pair, "programs.skips_infinite_steps('fsdp', False, 1.0)") == [(1, True, True)] * 2


def test_a_cell_that_prepares_again_frees_what_it_had(pair: nbdist.Session, record_property: Record) -> None:
    found = values(pair, "programs.allocated_by_cell(4, strategy='fsdp')")
    record_property("MiB allocated by cell", found[0])
    assert all(each[-1] <= 1.1 * each[1] + 1 for each in found)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_synchronized_batchnorm_equals_one_process_on_the_joined_batch(pair: nbdist.Session, strategy: str) -> None:
    if value(pair, "device.type") == "cpu":
        pytest.skip("SyncBatchNorm needs a GPU")
    assert max(values(pair, f"programs.batchnorm_distance({strategy!r}, True)")) < 1e-5
