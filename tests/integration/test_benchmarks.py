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


def test_benchmarks_of_gpus_say_that_there_is_none() -> None:
    """All in one process, which imports torch once."""
    paths = [f"benchmarks/{name}.py" for name in ON_GPUS]
    code = (
        "import runpy, sys\n"
        "for path in sys.argv[1:]:\n"
        "    sys.argv = [path]\n"
        "    try: runpy.run_path(path, run_name='__main__')\n"
        "    except SystemExit as end: print(path, end.code)"
    )
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": "benchmarks"}
    program = [sys.executable, "-c", code, *paths]
    done = subprocess.run(program, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=LIMIT, check=True)
    assert done.stdout.splitlines() == [line for path in paths for line in ("no GPU", f"{path} 0")], done.stderr


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
