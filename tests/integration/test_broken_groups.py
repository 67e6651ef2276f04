"""A process group that a failed collective has broken is usable again in the next cell, though the error was caught."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from testbed.kernel import Kernel
from tests.conftest import shared_kernel
from tests.support.group_programs import WAIT_AND_TOTAL

pytestmark = pytest.mark.torch_private

SETUP = f"""%%distributed
{WAIT_AND_TOTAL}
from datetime import timedelta
short = timedelta(seconds=0.2)
group = dist.new_group(range(world_size), timeout=short)

def without_the_last(gate, collective):
    "The others catch the error of a collective for which the last rank is too late."
    if rank == world_size - 1: wait_for(gate)
    try:
        collective()
    except RuntimeError:
        open(gate, "w").close()
        return "caught"
"""


@pytest.fixture(scope="module")
def shared() -> Iterator[Kernel]:
    with shared_kernel(3) as kernel:
        kernel.ok("import nbdist\nsession = nbdist.get_session()")
        kernel.ok(SETUP)
        yield kernel


@pytest.fixture
def kernel(shared: Kernel) -> Iterator[Kernel]:
    yield shared
    assert "[0-2] (3, 3)" in shared.ok("%%distributed\ntotal(), total(group)").plain


REBUILT = "because the cell caught an error that had broken them"


@pytest.mark.parametrize(
    "collective",
    ["total(group)", "dist.all_reduce(torch.ones(1), group=group, async_op=True).wait()"],
)
def test_a_group_whose_time_out_was_caught_is_rebuilt_and_the_cell_says_so(
    kernel: Kernel, tmp_path: Path, collective: str
) -> None:
    cell = kernel.ok(f"%%distributed\nwithout_the_last({str(tmp_path / 'gate')!r}, lambda: {collective})")
    assert REBUILT in str(cell)
    assert "gradients" not in str(cell)


def test_so_is_the_default_group_after_a_monitored_barrier(kernel: Kernel, tmp_path: Path) -> None:
    barrier = "lambda: dist.monitored_barrier(timeout=short, wait_all_ranks=True)"
    cell = kernel.ok(f"%%distributed\nif rank < 2: without_the_last({str(tmp_path / 'gate')!r}, {barrier})")
    assert REBUILT in str(cell)


def test_so_is_a_group_of_two_that_timed_out_in_a_cell_on_one_of_them(kernel: Kernel) -> None:
    kernel.ok("%%distributed\npair = dist.new_group([0, 1], timeout=short)")
    receive = "try: dist.recv(torch.ones(1), src=1, group=pair)\nexcept RuntimeError: pass"
    assert REBUILT in str(kernel.ok(f"%%distributed -r 0\n{receive}"))
    assert "[0-1] 2" in kernel.ok("%%distributed -r 0,1\ntotal(pair)").plain


def test_with_a_busy_rank_it_is_rebuilt_before_the_next_cell_there(kernel: Kernel, tmp_path: Path) -> None:
    waiting = f"wait_for({str(tmp_path / 'end')!r})"
    kernel.ok(f"busy = session.run_in_background({waiting!r}, ranks=2, show=False)")
    cell = kernel.ok(f"%%distributed -r 0,1\nwithout_the_last({str(tmp_path / 'gate')!r}, lambda: total(group))")
    assert "rebuilt before the next cell that starts with rank 2 idle" in str(cell)
    (tmp_path / "end").touch()
    kernel.ok("busy.wait(20)")


def test_a_time_out_that_ends_the_cell_leaves_the_group_usable_too(kernel: Kernel) -> None:
    failed = kernel.fails("%%distributed\nif rank < 2: total(group)", "RankError")
    assert "process groups rebuilt" in failed.traceback


def test_gradients_are_kept_unless_their_model_communicates_in_the_group(kernel: Kernel, tmp_path: Path) -> None:
    kernel.ok(
        """%%distributed
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(1, 1), process_group=group)
plain = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(1, 1))
for each in (model, plain): each(torch.ones(1, 1)).sum().backward()"""
    )
    gate = str(tmp_path / "gate")
    cell = kernel.ok(f"%%distributed\nwithout_the_last({gate!r}, lambda: model(torch.ones(1, 1)).sum().backward())")
    assert REBUILT in str(cell)
    assert "gradients of the interrupted step dropped" in str(cell)


def test_a_group_that_ranks_destroy_at_different_times_is_not_broken(kernel: Kernel, tmp_path: Path) -> None:
    gate = str(tmp_path / "gate")
    cell = kernel.ok(
        f"""%%distributed
other = dist.new_group(range(world_size))
dist.barrier(other)
if rank == 0: wait_for({gate!r})
dist.destroy_process_group(other)
open({gate!r}, "w").close()"""
    )
    assert "process groups" not in str(cell)
