"""The same training in a `%%distributed` cell, in `notebook_launcher`, under torchrun, and in one plain process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import nbdist
from testbed.kernel import Kernel
from tests.conftest import shared_kernel
from tests.support.train_places import train

ROOT = Path(__file__).resolve().parents[2]
PLAN = {"strategy": "fsdp", "accumulate": 2}  # the last of the three windows of an epoch is a short one
BATCH = 3


@pytest.fixture(scope="module")
def planned() -> Iterator[Kernel]:
    """Two ranks whose plan was typed."""
    with shared_kernel(2) as kernel:
        kernel.ok("import nbdist\nfrom tests.support import train_places")
        kernel.ok("%distributed plan fsdp --accumulate 2")
        yield kernel


@pytest.fixture
def expected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """What one plain process makes of it, without a process group, with the whole batch."""
    monkeypatch.setenv("NBDIST_PLAN", json.dumps(PLAN))
    found = train(str(tmp_path / "alone"), 2 * BATCH)
    nbdist.free_memory()
    assert found[0] == found[1]
    return [pytest.approx(values, rel=1e-12) for values in found]


def test_in_a_cell(planned: Kernel, tmp_path: Path, expected: Any) -> None:
    planned.ok(
        f"%%distributed\nfrom tests.support import train_places\nfound = train_places.train('{tmp_path}/a', {BATCH})"
    )
    first, second = planned.value("nbdist.get_session().pull('found')")
    assert first == second == expected


def test_in_a_launched_function(planned: Kernel, tmp_path: Path, expected: Any) -> None:
    arguments = f"({str(tmp_path / 'a')!r}, {BATCH})"
    planned.ok(f"found = nbdist.notebook_launcher(train_places.train, {arguments}, 2, start_method='warm')")
    first, second = planned.value("found")
    assert first == second == expected


def test_in_a_script_under_torchrun(tmp_path: Path, expected: Any) -> None:
    """It makes no process group by itself."""
    done = torchrun("-m", "tests.support.train_places", str(tmp_path / "a"), str(BATCH))
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == expected


def test_a_script_ends_well_while_gloo_still_frees_a_tensor(tmp_path: Path) -> None:
    """Its threads want the GIL for that, at a time when Python is about to end."""
    script = tmp_path / "script.py"
    script.write_text(SLOW_TO_FREE)
    done = torchrun(str(script))
    assert done.returncode == 0, done.stderr
    assert done.stdout == "freed\n"


SLOW_TO_FREE = """
import sys, threading, time, weakref
import torch, torch.distributed as dist
import nbdist

freeing = threading.Event()

def free_slowly():
    freeing.set()
    time.sleep(0.3)
    sys.stdout.write("freed\\n")

nbdist.wait_for_everyone()
if nbdist.is_main_process():
    tensor = torch.ones(2)
    weakref.finalize(tensor, free_slowly).atexit = False
    dist.all_reduce(tensor, async_op=True)
    del tensor  # gloo is the last to hold it: rank 1 comes later
    dist.send(torch.ones(1), 1)
    freeing.wait()
else:
    dist.recv(torch.ones(1), 0)
    dist.all_reduce(torch.ones(2))
"""


def torchrun(*arguments: str) -> subprocess.CompletedProcess[str]:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.run([*launcher, *arguments], env=environment, capture_output=True, text=True, check=False)


# --- what the notebook says reaches a launch


def test_a_launch_follows_the_typed_plan_in_the_precision_that_it_names(planned: Kernel) -> None:
    planned.ok(
        "def found():\n"
        "    from nbdist.plan import Plan\n"
        "    plan = Plan.from_environment()\n"
        "    return plan.strategy, plan.accumulate, plan.precision"
    )
    planned.ok("told = nbdist.notebook_launcher(found, (), 2, 'bf16')")
    assert planned.value("told") == [("fsdp", 2, "bf16")] * 2


def test_an_error_of_nbdist_ends_with_the_users_line(planned: Kernel, tmp_path: Path) -> None:
    """Whatever stands between nbdist's own frames, such as those of context managers."""
    outcome = planned.fails(f"%%distributed\nnbdist.load_state('{tmp_path}/none')", "RankError")
    assert "----> 2 nbdist.load_state" in outcome.traceback and "contextlib" not in outcome.traceback
