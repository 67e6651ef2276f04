"""`nbdist.set_plan`: what `prepare` follows in a script."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import torch, nbdist
plan = nbdist.Plan("none", accumulate=3)
nbdist.set_plan(plan)
nbdist.prepare(torch.nn.Linear(2, 2))
print(nbdist.train.state.current().plan == plan)
for wrong in ("fsdp", nbdist.Plan("fsdp", tp=2)):
    try:
        nbdist.set_plan(wrong)
    except nbdist.UsageError as error:
        print(error)
print(nbdist.Plan.from_environment() == plan)
"""


def test_prepare_follows_it_and_a_wrong_one_changes_nothing() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=60, check=True)
    lines = done.stdout.splitlines()
    assert (lines[0], lines[-1], len(lines)) == ("True", "True", 4)
    assert "set_plan needs a plan, got 'fsdp': nbdist.set_plan(nbdist.Plan('fsdp'))" in lines
    assert "tp" in lines[2]
