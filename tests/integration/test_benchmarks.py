"""Every benchmark runs: one small round of each. Their figures are for `scripts/bench`, on a quiet machine."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import sharing

ROOT = Path(__file__).resolve().parents[2]
ALL = sorted(path.stem for path in (ROOT / "benchmarks").glob("[!_]*.py"))
ON_GPUS = [name for name in ALL if name.startswith("gpu_")]  # scripts/gpu runs them, docs/gpu.md has their figures
NAMES = [name for name in ALL if name not in ON_GPUS]
LIMIT = 240.0  # seconds until a benchmark counts as hanging
ENDS = "this benchmark has ended with"
# Runs benchmarks by their names, in one process: it imports torch once, and its sessions share a template.
PROGRAM = f"""
import os, runpy, sys, traceback
before = dict(os.environ)
while name := sys.stdin.readline().strip():
    sys.argv = [f"benchmarks/{{name}}.py"]
    end = 0
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
    except SystemExit as ended:
        end = ended.code or 0
    except BaseException:
        traceback.print_exc(file=sys.stdout)
        end = 1
    os.environ.clear()
    os.environ.update(before)
    print("{ENDS}", end, flush=True)
"""


class Runner:
    """A process that runs one benchmark after the other."""

    def __init__(self, **environment: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-u", "-c", PROGRAM],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": "benchmarks", **environment},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.pid = self._process.pid

    def run(self, name: str) -> tuple[str, list[str]]:
        """How a benchmark ended, and its lines."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(f"{name}\n")
        self._process.stdin.flush()
        lines: list[str] = []
        watchdog = threading.Timer(LIMIT, self._process.kill)
        watchdog.start()
        try:
            for line in self._process.stdout:
                if line.startswith(ENDS):
                    return line.removeprefix(ENDS).strip(), lines
                lines.append(line.rstrip("\n"))
        finally:
            watchdog.cancel()
        return f"the end of its process: {self._process.wait()}", lines

    def close(self) -> None:
        """Let it end."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()


@pytest.fixture(scope="module")
def runner() -> Iterator[Runner]:
    runner = Runner(NBDIST_BENCH_ONCE="1")
    with sharing(runner):
        yield runner
    runner.close()


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_benchmark_runs_to_its_end_and_prints_figures(name: str, runner: Runner) -> None:
    end, lines = runner.run(name)
    shown = "\n".join(lines)
    assert end == "0", shown
    assert len(lines) >= 2 and "WRONG" not in shown, shown


def test_the_script_runs_the_benchmark_that_it_is_given() -> None:
    command = [sys.executable, "scripts/run_benchmarks.py", "--once", "step_hook"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith("== step_hook\n") and len(done.stdout.splitlines()) >= 3, done.stdout


def test_benchmarks_of_gpus_say_that_there_is_none() -> None:
    runner = Runner(CUDA_VISIBLE_DEVICES="")
    assert [runner.run(name) for name in ON_GPUS] == [("0", ["no GPU"])] * len(ON_GPUS)
    runner.close()


def test_every_benchmark_has_its_figures_on_the_page() -> None:
    page = (ROOT / "docs" / "performance.md").read_text(encoding="utf-8")
    missing = [name for name in NAMES if f"\n### {name}\n" not in page]
    assert not missing, f"scripts/bench {' '.join(missing)} --write"
