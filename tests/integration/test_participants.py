"""What all ranks must call is refused where only some can, and waits for a rank that is only late."""

from __future__ import annotations

from pathlib import Path

import pytest

from testbed.kernel import Kernel
from tests.support.cells import on_ranks

SETUP = """
import nbdist, pathlib, time, torch
from nbdist.train.collective import meeting
model = nbdist.prepare(torch.nn.Linear(2, 2))
ones = torch.ones(2)

def main_first():
    with nbdist.main_process_first():
        print("inside")

"""
CALLS = {
    "save_state": "nbdist.save_state('unused')",
    "load_state": "nbdist.load_state('unused')",
    "save_model": "nbdist.save_model(model, 'unused')",
    "load_model": "nbdist.load_model(model, 'unused')",
    "prepare": "nbdist.prepare(torch.nn.Linear(2, 2))",
    "gather": "nbdist.gather(ones)",
    "gather_for_metrics": "nbdist.gather_for_metrics(ones)",
    "gather_object": "nbdist.gather_object([1])",
    "reduce": "nbdist.reduce(ones)",
    "broadcast": "nbdist.broadcast(ones)",
    "broadcast_object_list": "nbdist.broadcast_object_list([1])",
    "pad_across_processes": "nbdist.pad_across_processes(ones)",
    "wait_for_everyone": "nbdist.wait_for_everyone()",
    "main_process_first": "main_first()",
    "check": "nbdist.check(model)",
    "sync": "nbdist.sync(model)",
}


@pytest.fixture(scope="module")
def two(ranks: Kernel) -> Kernel:
    ranks.ok(f"%%distributed\n{SETUP}")
    return ranks


def test_what_all_ranks_must_call_is_refused_at_once_in_a_cell_on_some(two: Kernel) -> None:
    for function, call in CALLS.items():
        outcome = two.fails(f"%%distributed -r 1\n{call}", "RankError", limit=10)
        assert outcome.evalue == (
            f"rank 1 raised UsageError: {function} must be called on all 2 ranks, but this cell runs on rank 1 only: "
            "run it on all ranks (`%%distributed` without `-r`)"
        )
        assert "inside" not in outcome.stdout
    assert on_ranks(two, "nbdist.gather(ones).tolist()") == ["[0-1] [1.0, 1.0, 1.0, 1.0]"]


def test_a_rank_that_is_late_is_named_and_waited_for(two: Kernel, tmp_path: Path) -> None:
    late = (
        "meeting.REPORT_AFTER = 0.1\n"
        f"while rank == 0 and not pathlib.Path('{tmp_path}/go').exists(): time.sleep(0.01)\n"
        f"nbdist.save_state('{tmp_path}/saved')\n"
        "meeting.REPORT_AFTER = 30.0"
    )
    cell = two.start(f"%%distributed\n{late}")
    cell.wait_for("nbdist: save_state has waited 0.1 s for rank 0 and gives up after 1800 s")
    (tmp_path / "go").touch()
    outcome = cell.finish()
    assert outcome.status == "ok", str(outcome)
    assert outcome.stderr.count("has waited") == 1
    assert (tmp_path / "saved").is_dir()


def test_a_rank_that_has_finished_the_cell_is_not_waited_for(two: Kernel, tmp_path: Path) -> None:
    outcome = two.fails(f"%%distributed\nif rank == 0:\n    nbdist.save_state('{tmp_path}/saved')", "RankError")
    assert outcome.evalue.startswith("rank 0 raised UsageError: waits in save_state, cell ")
    assert outcome.evalue.endswith(
        " line 3, for rank 1, which has finished the cell: call it on all ranks, not under `if is_main_process()`"
    )
    assert "rebuilt" not in outcome.traceback
    assert on_ranks(two, f"nbdist.save_state('{tmp_path}/saved').path.name") == ["[0-1] 'saved'"]
