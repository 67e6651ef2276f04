"""Every benchmark runs: one small round of each. Their figures are for `scripts/bench`, on a quiet machine."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ALL = sorted(path.stem for path in (ROOT / "benchmarks").glob("[!_]*.py"))
ON_GPUS = [name for name in ALL if name.startswith("gpu_")]  # scripts/gpu runs them, docs/gpu.md has their figures
NAMES = [name for name in ALL if name not in ON_GPUS]
LIMIT = 240.0


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_benchmark_runs_to_its_end_and_prints_figures(name: str) -> None:
    done = once(name)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(done.stdout.splitlines()) >= 3 and "WRONG" not in done.stdout, done.stdout


@pytest.mark.parametrize("name", ON_GPUS)
def test_a_benchmark_of_gpus_says_that_there_is_none(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    done = once(name)
    assert (done.returncode, done.stdout.splitlines()[1:]) == (0, ["no GPU"]), done.stdout + done.stderr


def once(name: str) -> subprocess.CompletedProcess[str]:
    """One small round of a benchmark."""
    return subprocess.run(
        [sys.executable, "scripts/run_benchmarks.py", "--once", name],
        cwd=ROOT,
        env=os.environ,
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=False,
    )


def test_every_benchmark_has_its_figures_on_the_page() -> None:
    page = (ROOT / "docs" / "performance.md").read_text(encoding="utf-8")
    missing = [name for name in NAMES if f"\n### {name}\n" not in page]
    assert not missing, f"scripts/bench {' '.join(missing)} --write"
