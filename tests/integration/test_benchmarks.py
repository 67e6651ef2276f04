"""Every benchmark runs: one small round of each. Their figures are for `scripts/bench`, on a quiet machine."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
NAMES = sorted(path.stem for path in (ROOT / "benchmarks").glob("[!_]*.py"))
LIMIT = 240.0


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_benchmark_runs_to_its_end_and_prints_figures(name: str) -> None:
    done = subprocess.run(
        [sys.executable, "scripts/run_benchmarks.py", "--once", name],
        cwd=ROOT,
        env=os.environ,
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(done.stdout.splitlines()) >= 3 and "WRONG" not in done.stdout, done.stdout


def test_every_benchmark_has_its_figures_on_the_page() -> None:
    page = (ROOT / "docs" / "performance.md").read_text(encoding="utf-8")
    missing = [name for name in NAMES if f"\n### {name}\n" not in page]
    assert not missing, f"scripts/bench {' '.join(missing)} --write"
