"""After any failed cell every sum is right, or an error says why not: a sample of tests/stress/right_sums.py."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.torch_private, pytest.mark.slow]

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(("ranks", "seed"), [(3, 1), (4, 2)])
def test_every_sum_after_a_random_sequence_of_cells_is_right_or_an_error(ranks: int, seed: int) -> None:
    command = [sys.executable, "-m", "tests.stress.right_sums", f"--ranks={ranks}", f"--seed={seed}", "--count=6"]
    done = subprocess.run(command, check=False, cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    assert "process groups were rebuilt" in done.stdout
