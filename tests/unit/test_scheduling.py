"""A run of tests goes on, and ends, when a test has ended a worker."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FILE = """
import os, pathlib, pytest
@pytest.mark.parametrize("number", range(6))
def test_some(number):
    path = pathlib.Path(__file__).with_suffix(f".{{number}}")
    path.write_text(path.read_text() + "x" if path.exists() else "x")
    if (number, pathlib.Path(__file__).stem) == ({number}, "test_3"): os._exit(3)
"""


@pytest.mark.parametrize("number", [0, 2, 5], ids=["first", "in the middle", "last"])
def test_all_others_run_once_and_the_one_that_ended_it_has_failed(tmp_path: Path, number: int) -> None:
    for file in range(6):
        (tmp_path / f"test_{file}.py").write_text(FILE.format(number=number))
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    command = [sys.executable, "-m", "pytest", "-p", "xdist", "--numprocesses", "2", "--dist", "loadfile"]
    command += ["-p", "tests.support.scheduling", "--no-loadscope-reorder"]
    own = {"PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_ADDOPTS": ""}
    done = subprocess.run(
        command, cwd=tmp_path, env={**os.environ, **own}, capture_output=True, text=True, check=False, timeout=120
    )
    assert f"test_3.py::test_some[{number}]" in done.stdout and "1 failed, 35 passed" in done.stdout, done.stdout
    assert {path.read_text() for path in tmp_path.glob("test_?.[0-9]")} == {"x"}
