"""Groups that could not be compared after a failed cell are not used as they are: a sum is right, or an error."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from testbed.kernel import Execution, Kernel, wait_until
from tests.conftest import shared_kernel
from tests.support.group_programs import WAIT_AND_TOTAL

pytestmark = pytest.mark.torch_private

SETUP = f"%%distributed\n{WAIT_AND_TOTAL}\nkept = torch.nn.Linear(2, 1)"


@pytest.fixture(scope="module")
def shared() -> Iterator[Kernel]:
    with shared_kernel(3) as kernel:
        kernel.ok("import nbdist\nsession = nbdist.get_session()")
        kernel.ok(SETUP)
        yield kernel


@pytest.fixture
def kernel(shared: Kernel) -> Iterator[Kernel]:
    yield shared
    assert "[0-2] 3" in shared.ok("%%distributed\ntotal()").plain


def generation(kernel: Kernel) -> int:
    return int(kernel.value("session.status()[0]['generation']"))


def state(kernel: Kernel, rank: int) -> str:
    return str(kernel.value(f"session.status()[{rank}]['state']"))


def start_failing(
    kernel: Kernel, gate: Path, before: str = "work = dist.all_reduce(torch.ones(1) * 100, async_op=True)"
) -> None:
    """A cell on ranks 0 and 1 in the background, which rank 1 has finished and which fails on rank 0 at the gate."""
    code = f"if rank == 0:\n    wait_for({str(gate)!r})\n    {before}\n    raise ValueError('boom')"
    kernel.ok(f"failing = session.run_in_background({code!r}, ranks=[0, 1], show=False)")
    wait_until(lambda: state(kernel, 1) == "idle", "rank 1 to finish")


def fail(kernel: Kernel, gate: Path) -> str:
    """Let that cell fail. Returns what is said of it."""
    gate.touch()
    return kernel.fails("failing.wait(20)", "RankError").traceback


@contextmanager
def busy(kernel: Kernel, rank: int, gate: Path) -> Iterator[None]:
    """A rank runs a cell of its own meanwhile."""
    code = f"wait_for({str(gate)!r})"
    kernel.ok(f"busy = session.run_in_background({code!r}, ranks={rank}, show=False)")
    yield
    gate.touch()
    kernel.ok("busy.wait(20)")


@contextmanager
def stopped(kernel: Kernel, rank: int) -> Iterator[None]:
    """A rank answers nothing meanwhile."""
    pid = kernel.rank_pids()[rank]
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def line_of(cell: Execution) -> str:
    return next((text for text in cell.outcome.plain if "waiting for" in text), "")


def test_a_group_of_a_busy_rank_is_an_error_until_the_rank_is_idle_and_then_right(
    kernel: Kernel, tmp_path: Path
) -> None:
    start_failing(kernel, tmp_path / "fail")
    with busy(kernel, 1, tmp_path / "idle"):
        text = fail(kernel, tmp_path / "fail")
        assert "process groups shared with rank 1 may be out of step" in text.splitlines()[-1]
        stale = kernel.fails("%%distributed -r 0,2\ntotal()", "RankError")
        assert "StaleGroupError" in stale.evalue and "rebuilds it before the next cell" in stale.evalue
        assert kernel.ok("%%distributed -r 0,2\n6 * 7").plain == ["[0,2] 42"]
    before = generation(kernel)
    seen = kernel.ok("%%distributed\ntotal()")
    assert "[0-2] 3" in seen.plain
    assert f"nbdist: process groups rebuilt (generation {before + 1})" in seen.plain


def test_a_group_of_a_busy_rank_that_the_failed_cell_left_alone_can_be_used_and_is_not_rebuilt(
    kernel: Kernel, tmp_path: Path
) -> None:
    before = generation(kernel)
    kernel.ok("%%distributed\nkept.weight.grad = torch.ones(1, 2)")
    with busy(kernel, 1, tmp_path / "idle"):
        kernel.fails("%%distributed -r 0,2\n1/0", "RankError")
    assert kernel.ok("%%distributed\ntotal(), kept.weight.grad.sum().item()").plain == ["[0-2] (3, 2.0)"]
    assert generation(kernel) == before


def test_a_rank_that_has_failed_can_be_used_while_its_cell_runs_on_elsewhere(kernel: Kernel, tmp_path: Path) -> None:
    end = tmp_path / "end"
    enter = "dist.all_reduce(torch.ones(1) * 100, group=pair, async_op=True)"
    code = f"if rank == 0:\n    {enter}\n    1/0\nwait_for({str(end)!r})"
    kernel.ok("%%distributed\npair = dist.new_group([0, 2])")
    kernel.ok(f"failing = session.run_in_background({code!r}, ranks=[0, 1], show=False)")
    wait_until(lambda: state(kernel, 0) == "idle", "rank 0 to fail")
    assert "[0,2] 2" in kernel.ok("%%distributed -r 0,2\ntotal(pair)").plain
    end.touch()
    kernel.fails("failing.wait(20)", "RankError")


def test_a_cell_waits_for_a_rank_that_does_not_answer_and_says_so(kernel: Kernel, tmp_path: Path) -> None:
    start_failing(kernel, tmp_path / "fail")
    with stopped(kernel, 1):
        fail(kernel, tmp_path / "fail")
        cell = kernel.start("%%distributed\ntotal()")
        cell.wait_until(lambda seen: bool(line_of(cell)), "a line that says so")
        assert "waiting for rank 1, which has not answered for" in line_of(cell)
        assert line_of(cell).endswith("Interrupt this cell to cancel it.")
    outcome = cell.finish()
    assert outcome.status == "ok", str(outcome)
    assert "[0-2] 3" in outcome.plain and any("rebuilt" in text for text in outcome.plain)


def test_an_interrupt_of_a_cell_that_waits_drops_it(kernel: Kernel, tmp_path: Path) -> None:
    start_failing(kernel, tmp_path / "fail")
    with stopped(kernel, 1):
        fail(kernel, tmp_path / "fail")
        cell = kernel.start("%%distributed\nran = True")
        cell.wait_until(lambda seen: bool(line_of(cell)), "a line that says so")
        kernel.interrupt()
        outcome = cell.finish(10)
        assert outcome.ename == "KeyboardInterrupt", str(outcome)
        assert any("for rank 1, then was canceled" in text for text in outcome.plain)
    assert "[0-2] False" in kernel.ok("%%distributed\n'ran' in globals()").plain


def test_a_rank_that_answers_late_and_is_in_step_costs_nothing_but_time(kernel: Kernel, tmp_path: Path) -> None:
    before = generation(kernel)
    start_failing(kernel, tmp_path / "fail", before="pass")
    with stopped(kernel, 1):
        text = fail(kernel, tmp_path / "fail")
        assert "rank 1 did not answer in time" in text.splitlines()[-1]
    assert kernel.ok("%%distributed\ntotal()").plain == ["[0-2] 3"]
    assert generation(kernel) == before


def test_cells_on_other_ranks_do_not_wait_for_it_but_may_not_use_its_groups(kernel: Kernel, tmp_path: Path) -> None:
    start_failing(kernel, tmp_path / "fail")
    with stopped(kernel, 1):
        fail(kernel, tmp_path / "fail")
        assert kernel.ok("%%distributed -r 0,2\n6 * 7").plain == ["[0,2] 42"]
        assert "StaleGroupError" in kernel.fails("%%distributed -r 0,2\ntotal()", "RankError").evalue


def test_a_rank_that_dies_while_a_cell_waits_for_it_ends_the_wait(tmp_path: Path) -> None:
    with shared_kernel(3) as kernel:
        kernel.ok("import nbdist\nsession = nbdist.get_session()")
        kernel.ok(SETUP)
        start_failing(kernel, tmp_path / "fail")
        pid = kernel.rank_pids()[1]
        os.kill(pid, signal.SIGSTOP)
        fail(kernel, tmp_path / "fail")
        cell = kernel.start("%%distributed\n6 * 7")
        cell.wait_until(lambda seen: bool(line_of(cell)), "a line that says so")
        os.kill(pid, signal.SIGKILL)
        assert cell.finish(10).ename == "RankDied"
        assert "StaleGroupError" in kernel.fails("%%distributed -r 0,2\ntotal()", "RankError").evalue
