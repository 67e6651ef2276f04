"""docs/reliability.md: after each of these cells the next one works, or the death of a rank is named."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from testbed.kernel import Kernel, both
from tests.conftest import shared_kernel
from tests.support.odd_cells import DIES, FAILS, ODD_CELLS, OddCell
from tests.support.roles import revive

PAGE = Path(__file__).resolve().parents[2] / "docs" / "reliability.md"
SEED = int(os.environ.get("NBDIST_TEST_SEED", "2026"))
CELLS = 200
FAULTS = 15

NEXT = """%%distributed
import torch, torch.distributed as dist
total = torch.tensor([float(rank + 1)], device=device)
dist.all_reduce(total)
print('sum', total.item(), 'kept', kept)
"""
SIGNALS = [odd for odd in ODD_CELLS if "interrupts" in odd.name]


@pytest.fixture(scope="module")
def kernel() -> Iterator[Kernel]:
    with shared_kernel(2) as kernel:
        yield kernel


@pytest.fixture
def fresh(kernel: Kernel, tmp_path: Path) -> Kernel:
    """Two ranks that know `kept` and `path`, and nothing of the cells before."""
    revive(kernel)
    kernel.ok(f"%%distributed\nkept, path = 7, {str(tmp_path)!r}")
    return kernel


def leaves_something(odd: OddCell) -> bool:
    return bool(odd.remains) and not odd.remains.startswith("nothing")


@pytest.mark.parametrize("odd", [odd for odd in ODD_CELLS if odd.outcome != DIES], ids=lambda odd: odd.name)
def test_the_cell_after_an_odd_one_works(odd: OddCell, fresh: Kernel) -> None:
    outcome = fresh.run(f"%%distributed\n{odd.code}")
    assert bool(outcome.ename) == (odd.outcome == FAILS), str(outcome)
    assert odd.shown in outcome.traceback
    if odd.name == "reset":
        fresh.ok("%%distributed\nkept = 7")
    lines = fresh.ok(NEXT).lines  # and what threads print late
    assert all("sum 3.0 kept 7" in lines[rank] for rank in (0, 1)), lines
    if leaves_something(odd):
        fresh.ok("%distributed restart")


@pytest.mark.parametrize("odd", [odd for odd in ODD_CELLS if odd.outcome == DIES], ids=lambda odd: odd.name)
def test_a_cell_that_ends_a_rank_says_how_and_the_other_keeps_its_variables(odd: OddCell, fresh: Kernel) -> None:
    outcome = fresh.fails(f"%%distributed\n{odd.code}", "RankDied")
    assert odd.shown in outcome.evalue
    assert fresh.ok("%%distributed -r 1\nprint(kept)").lines == {1: ["7"]}


@pytest.mark.parametrize("odd", SIGNALS, ids=lambda odd: odd.name)
def test_a_cell_after_one_that_tampered_with_interrupts_can_be_interrupted(odd: OddCell, fresh: Kernel) -> None:
    fresh.ok(f"%%distributed\n{odd.code}")
    cell = fresh.start("%%distributed\nprint('go')\nwhile True:\n    pass")
    cell.wait_until(lambda seen: seen.lines == both("go"), "both ranks at it")
    fresh.interrupt()
    assert cell.finish().ename == "KeyboardInterrupt"


def test_the_page_has_a_row_for_each_odd_cell() -> None:
    rows = PAGE.read_text(encoding="utf-8")
    missing = [row for odd in ODD_CELLS if (row := row_of(odd)) not in rows]
    assert not missing, "\n".join(missing)


def test_every_test_that_the_page_names_is_there() -> None:
    named = re.findall(r"`((?:\w+/)*\w+\.py)`", PAGE.read_text(encoding="utf-8"))
    files = {path.name for folder in ("tests", "testbed") for path in (PAGE.parents[1] / folder).rglob("*.py")}
    missing = [name for name in named if name.rpartition("/")[2] not in files]
    assert named and not missing, missing


def row_of(odd: OddCell) -> str:
    """The row of the page's table for an odd cell."""
    return f"| {odd.situation} | {odd.outcome} | {odd.remains or 'nothing'} |"


@pytest.mark.slow
def test_processes_that_end_or_stop_at_random_moments_are_named_and_nothing_else_is_lost() -> None:
    plan = [sys.executable, "-m", "tests.stress.fault_plan", "--faults", str(FAULTS), "--seed", str(SEED), "--verbose"]
    done = subprocess.run(plan, cwd=PAGE.parents[1], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
def test_random_cells_leave_ranks_that_work() -> None:
    fuzz = [sys.executable, "-m", "tests.stress.cell_fuzz", "--cells", str(CELLS), "--seed", str(SEED)]
    done = subprocess.run(fuzz, cwd=PAGE.parents[1], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
