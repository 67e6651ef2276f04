"""The live line below a cell whose ranks wait for each other. The five seconds until it comes are real."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import torch

from testbed.kernel import Kernel, Outcome
from tests.support.cells import end_background


def live_line(seen: Outcome) -> str:
    """What the line below the cell says now; "" while there is none."""
    return next((text for text in seen.plain if text.startswith("nbdist: ")), "")


@pytest.mark.torch_private
def test_a_live_line_says_who_waits_for_whom_and_when_it_is_over(ranks: Kernel, tmp_path: Path) -> None:
    gate = tmp_path / "open"
    ranks.ok("%%distributed\nimport time, os, torch, torch.distributed as dist")
    cell = ranks.start(
        "%%distributed\n"
        "if rank == 0:\n"
        f"    while not os.path.exists({str(gate)!r}): time.sleep(0.01)\n"
        "dist.all_reduce(torch.ones(1))"
    )
    cell.wait_until(lambda seen: bool(live_line(seen)), "a live line")
    line = live_line(cell.outcome)
    assert "rank 1 waits in all_reduce, cell" in line and "line 4; rank 0 is at cell" in line
    assert "line 3: while not os.path.exists" in line
    assert line.endswith("Interrupt the kernel to stop them.")
    gate.touch()
    outcome = cell.finish()
    assert outcome.status == "ok"
    assert outcome.plain == ["nbdist: waited for rank 0, then went on"]
    assert "nbdist:" not in outcome.stdout + outcome.stderr


@pytest.mark.torch_private
def test_after_groups_were_rebuilt_it_is_said_of_a_background_cell_that_none_will_ever_move(ranks: Kernel) -> None:
    ranks.ok("%%distributed\nimport torch, torch.distributed as dist")
    stuck = "handle = __import__('nbdist').get_session().run_in_background("
    stuck += "'dist.barrier() if rank else dist.all_reduce(torch.ones(1))')"
    ranks.ok(stuck)
    end_background(ranks)
    cell = ranks.start(stuck)
    cell.wait_late("wait for each other")
    line = live_line(cell.outcome)
    assert "rank 0 waits in all_reduce" in line and "rank 1 waits in barrier" in line
    assert "They wait for each other, so none of them can continue. `%distributed interrupt` stops them." in line
    end_background(ranks)


@pytest.mark.torch_private
def test_a_cell_that_waits_for_a_rank_which_is_not_in_it_says_so_soon(ranks: Kernel) -> None:
    ranks.ok("%%distributed\nimport torch, torch.distributed as dist")
    cell = ranks.start("%%distributed -r 0\ndist.barrier()")
    cell.wait_until(lambda seen: bool(live_line(seen)), "a live line", limit=3)
    assert "rank 0 waits in barrier" in live_line(cell.outcome)
    assert "rank 1 is not in this cell" in live_line(cell.outcome)
    ranks.interrupt()
    assert cell.finish().ename == "KeyboardInterrupt"


@pytest.mark.torch_private
def test_different_calls_are_named_while_ranks_are_stuck_and_afterwards_in_the_flight_record(ranks: Kernel) -> None:
    ranks.ok("%%distributed\nimport torch, torch.distributed as dist\ngroup = dist.new_group([0, 1], group_desc='dp')")
    cell = ranks.start(
        "%%distributed\nvalue = torch.ones(3)\n"
        "dist.broadcast(value, 0, group=group) if rank else dist.all_reduce(value, group=group)"
    )
    cell.wait_until(lambda seen: bool(live_line(seen)), "a live line")
    assert "mismatched collectives: rank 0 waits in all_reduce #1 of group dp (float32[3])" in live_line(cell.outcome)
    assert "rank 1 waits in broadcast #1 of group dp (float32[3])" in live_line(cell.outcome)
    ranks.interrupt()
    assert cell.finish().ename == "KeyboardInterrupt"
    if not torch.__version__.startswith("2.8."):  # which records nothing of gloo
        marked = next(line for line in ranks.ok("%distributed flight").stdout.splitlines() if "<-" in line)
        assert " ".join(marked.split()) == "dp 1 all_reduce float32[3] broadcast float32[3] <- first difference"


def test_a_process_that_is_stopped_is_named(ranks: Kernel) -> None:
    pid = ranks.rank_pids()[1]
    cell = ranks.start("%%distributed -r 1\nprint('runs')\nimport time\nwhile True: time.sleep(0.01)")
    cell.wait_for("runs")
    os.kill(pid, signal.SIGSTOP)
    try:
        cell.wait_until(lambda seen: "rank 1 is stopped by a signal" in live_line(seen), "a live line")
        assert f"`kill -CONT {pid}`" in live_line(cell.outcome)
    finally:
        os.kill(pid, signal.SIGCONT)
    ranks.interrupt()
    assert cell.finish().ename == "KeyboardInterrupt"
