"""Ranks whose collectives go through NCCL: what they give, and what becomes of ranks that are stuck in one."""

from __future__ import annotations

import time

import pytest

import nbdist
from testbed.gpu_sharing import is_stuck, stuck_cell
from testbed.kernel import wait_until
from tests.gpu.conftest import Record, join_nccl, nccl_session, value, values
from tests.support.roles import alive

pytestmark = pytest.mark.gpu

# Rank 0 waits in a collective that rank 1 does not enter: for the result, or with more work queued behind it.
STUCK = {
    "for the result": "big = torch.ones(1 << 20, device=device)\ndist.all_reduce(big)\nprint(big.sum().item())",
    "with a full queue": (
        "big = torch.ones(1 << 20, device=device)\ndist.all_reduce(big)\n"
        "for _ in range(5000): big = big * 1.0\nprint(big.sum().item())"
    ),
}


@pytest.mark.parametrize("way", STUCK)
def test_a_rank_that_raises_frees_those_in_a_collective(
    nccl: nbdist.Session, way: str, record_property: Record
) -> None:
    began = time.perf_counter()
    with pytest.raises(nbdist.RankError) as caught:
        nccl.run(stuck_cell(STUCK[way], "raise ValueError('boom')"), timeout=45)
    record_property(f"freed in ({way})", f"{time.perf_counter() - began:.2f} s")
    assert not isinstance(caught.value, nbdist.RankTimeout)
    assert caught.value.first is not None and caught.value.first.text == "boom"
    assert value(nccl, "programs.all_reduce()", timeout=20) == 2.0


def test_an_interrupt_frees_a_rank_in_a_collective_and_the_next_sum_is_right(
    nccl: nbdist.Session, record_property: Record
) -> None:
    nccl.run("kept = 41 + rank")
    pids = [info.pid for info in nccl.ranks]
    seconds = []
    for _ in range(3):
        background = nccl.run_in_background(stuck_cell(STUCK["for the result"], "time.sleep(1000)"))
        wait_until(lambda: is_stuck(nccl), "rank 0 in the collective", 30)
        began = time.perf_counter()
        background.interrupt()
        with pytest.raises((nbdist.RankError, KeyboardInterrupt)):
            background.wait(30)
        assert background.done
        seconds.append(time.perf_counter() - began)
        assert value(nccl, "programs.all_reduce()", timeout=20) == 2.0
    record_property("interrupted in", ", ".join(f"{each:.2f} s" for each in seconds))
    assert values(nccl, "kept") == [41, 42] and [info.pid for info in nccl.ranks] == pids


def test_collectives_take_every_dtype(nccl: nbdist.Session) -> None:
    for kind in ("float32", "bfloat16", "bool", "uint8", "int64"):
        found = value(nccl, f"programs.collectives({kind!r})", timeout=20)
        assert found[:2] == [[6], [2]] and found[3:] == [[3], [2.0, 2.0]], (kind, found)


def test_a_rank_that_dies_frees_those_in_a_collective_with_their_variables(
    nccl: nbdist.Session, record_property: Record
) -> None:
    nccl.run("kept = 'still here'")
    began = time.perf_counter()
    with pytest.raises(nbdist.RankDied):
        nccl.run(stuck_cell(STUCK["for the result"], "os._exit(9)"), timeout=45)
    record_property("freed in", f"{time.perf_counter() - began:.2f} s")
    assert nccl.run("kept", ranks=[0], timeout=20)[0].result == "'still here'"


def test_a_collective_that_runs_into_its_time_out_leaves_the_rank_alive(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NCCL's watchdog ends the process unless it is told not to."""
    with nccl_session(monkeypatch) as session:
        join_nccl(session, seconds=10)
        with pytest.raises(nbdist.RankError) as caught:
            session.run(stuck_cell(STUCK["for the result"], "time.sleep(15)"), timeout=25)
        assert not isinstance(caught.value, nbdist.RankDied), caught.value.report
        assert alive(session.ranks[0].pid) and values(session, "rank", timeout=20) == [0, 1]


@pytest.mark.parametrize("hook", ["fp16", "bf16", "powersgd", "batched_powersgd"])
def test_communication_hooks_train(nccl: nbdist.Session, hook: str) -> None:
    if hook == "bf16" and value(nccl, "device.type") == "cpu":
        pytest.skip("gloo has no bf16 hook")
    try:
        found = value(nccl, f"programs.trains(steps=8, strategy='ddp', comm_hook={hook!r})", timeout=45)
    except nbdist.RankError as error:
        if error.first is None or error.first.name != "UsageError":
            raise
        pytest.skip(error.first.text)
    assert found == (True, True)


def test_a_lost_cuda_context_is_named_with_what_to_type_and_frees_the_others(nccl: nbdist.Session) -> None:
    if value(nccl, "device.type") == "cpu":
        pytest.skip("no GPU")
    lost = "torch.zeros(3, device=device)[torch.tensor([7], device=device)]; torch.cuda.synchronize()"
    with pytest.raises(nbdist.RankError) as caught:
        nccl.run(stuck_cell(STUCK["for the result"], lost), timeout=45)
    assert not isinstance(caught.value, (nbdist.RankTimeout, nbdist.RankDied)), caught.value.report
    assert next(iter(caught.value.failures)) == 1 and "restart" in caught.value.report, caught.value.report
