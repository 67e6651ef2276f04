"""Faults of the network and of the other machine, by a seeded plan: `tests.stress.network_plan` has more of them."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.multinode.hosts import two_hosts_by_cable
from tests.stress.network_plan import DISTURBANCES, LOSSES

SEED = 3


@pytest.mark.slow
@pytest.mark.parametrize(("kinds", "faults"), [(DISTURBANCES, 6), (LOSSES, 3)], ids=["that pass", "that stay"])
def test_faults_of_the_network_cost_time_or_one_machine(kinds: Sequence[str], faults: int) -> None:
    with two_hosts_by_cable():
        pass  # it skips where the system allows none
    chosen = [word for kind in kinds for word in ("--kind", kind)]
    plan = [sys.executable, "-m", "tests.stress.network_plan", "--faults", str(faults), "--seed", str(SEED), *chosen]
    root = Path(__file__).parents[2]
    done = subprocess.run([*plan, "--verbose"], cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
