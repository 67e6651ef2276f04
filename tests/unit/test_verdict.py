"""A run of tests passes if what failed in it passes alone, and it names that."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.verdict import ALLOWED

ROOT = Path(__file__).resolve().parents[2]
ONCE = """
import pathlib, pytest
@pytest.mark.parametrize("number", range({count}))
def test_fails_once(number):
    seen = pathlib.Path(__file__).with_name(f"seen-{{number}}")
    if not seen.exists():
        seen.touch()
        raise OSError("only at first")
"""
ALWAYS = "\ndef test_fails():\n    assert 1 == 2\n"
SKIPPED = "\nimport pytest\ndef test_is_skipped():\n    pytest.skip('no browser')\n"


def run(folder: Path, tests: str, workers: int = 0, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run them as the whole check runs ours."""
    (folder / "test_some.py").write_text(tests)
    (folder / "pytest.ini").write_text("[pytest]\n")
    command = [sys.executable, "-m", "pytest", "-p", "xdist", "--numprocesses", str(workers)]
    command += ["-p", "tests.support.verdict", "--run-failed-again"]
    own = {"PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "CI": "", **environment}
    return subprocess.run(command, cwd=folder, env={**os.environ, **own}, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_test_that_fails_once_is_named_and_the_run_passes(workers: int, tmp_path: Path) -> None:
    outcome = run(tmp_path, ONCE.format(count=1), workers)
    assert outcome.returncode == 0, outcome.stdout
    assert "test_some.py::test_fails_once[0] passed alone: unstable" in outcome.stdout
    assert "1 unstable" in outcome.stdout.splitlines()[-1] and "failed" not in outcome.stdout.splitlines()[-1]


def test_both_outputs_of_an_unstable_test_are_kept(tmp_path: Path) -> None:
    run(tmp_path, ONCE.format(count=1))
    [kept] = (tmp_path / "build" / "unstable").iterdir()
    assert "OSError: only at first" in (kept / "first.txt").read_text()
    assert "1 passed" in (kept / "again.txt").read_text()


def test_the_report_of_the_whole_run_is_not_written_over(tmp_path: Path) -> None:
    report = tmp_path / "report.xml"
    run(tmp_path, ONCE.format(count=1), PYTEST_ADDOPTS=f"--junitxml={report}")
    assert 'failures="1"' in report.read_text()


def test_a_test_that_fails_again_fails_the_run(tmp_path: Path) -> None:
    outcome = run(tmp_path, ONCE.format(count=1) + ALWAYS)
    assert outcome.returncode == 1
    assert "1 failed" in outcome.stdout.splitlines()[-1] and "1 unstable" in outcome.stdout.splitlines()[-1]


def test_more_than_a_few_unstable_tests_fail_the_run(tmp_path: Path) -> None:
    outcome = run(tmp_path, ONCE.format(count=ALLOWED + 1))
    assert outcome.returncode == 1
    assert f"{ALLOWED + 1} tests are unstable, {ALLOWED} are allowed" in outcome.stdout


@pytest.mark.parametrize("tests", [SKIPPED, SKIPPED + ONCE.format(count=1)], ids=["alone", "beside an unstable one"])
def test_in_ci_a_skipped_test_fails_the_run(tests: str, tmp_path: Path) -> None:
    assert run(tmp_path, tests).returncode == 0
    (tmp_path / "seen-0").unlink(missing_ok=True)
    outcome = run(tmp_path, tests, CI="true")
    assert outcome.returncode == 1
    assert "1 tests were skipped, which CI counts as a failure" in outcome.stdout
