"""What a run of tests amounts to beyond pytest's own rules: tests that CI must not skip, tests that fail only once.

A plugin of pytest; tests/conftest.py has its hooks, too.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Generator
from pathlib import Path

import pytest
from _pytest.terminal import TerminalReporter

UNSTABLE = Path("build") / "unstable"  # below the folder of pyproject.toml
ALLOWED = 3  # unstable tests in one run
WORTH_IT = 12  # failures up to which each is run again: more have one cause
PATIENCE = 600.0  # seconds for one test alone


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--run-failed-again", action="store_true", help="run each failed test alone, and pass if all of a few pass then"
    )


@pytest.hookimpl(wrapper=True, trylast=True)  # when the workers have ended, and before the summary
def pytest_sessionfinish(session: pytest.Session) -> Generator[None, None, None]:
    yield
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if not isinstance(reporter, TerminalReporter):  # a worker's
        return
    if session.exitstatus == pytest.ExitCode.TESTS_FAILED and session.config.getoption("--run-failed-again"):
        _run_failed_again(session, reporter)
    if os.environ.get("CI") == "true" and session.exitstatus == pytest.ExitCode.OK:
        _refuse_skipped(session, reporter)


def _refuse_skipped(session: pytest.Session, reporter: TerminalReporter) -> None:
    """A test may be skipped for a missing GPU or torch's build, and for nothing else."""
    skipped = [
        report for report in reporter.stats.get("skipped", []) if not {"gpu", "cuda_build"} & report.keywords.keys()
    ]
    if skipped:
        reporter.write_line(f"{len(skipped)} tests were skipped, which CI counts as a failure", red=True)
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def _run_failed_again(session: pytest.Session, reporter: TerminalReporter) -> None:
    """Run each failed test alone. The run passes if all pass then and they are few."""
    folder = session.config.rootpath / UNSTABLE
    shutil.rmtree(folder, ignore_errors=True)
    failed = {report.nodeid for key in ("failed", "error") for report in reporter.stats.get(key, [])}
    reporter.section("failed tests, once more")
    if not failed or len(failed) > WORTH_IT:
        reporter.write_line(f"{len(failed)} tests failed: none is run again")
        return
    unstable = [test for test in sorted(failed) if _passes_alone(test, session.config.rootpath, folder, reporter)]
    if set(unstable) == failed and len(unstable) <= ALLOWED:
        session.exitstatus = pytest.ExitCode.OK
    if len(unstable) > ALLOWED:
        reporter.write_line(f"{len(unstable)} tests are unstable, {ALLOWED} are allowed", red=True)
    for key in ("failed", "error"):
        reports = reporter.stats.pop(key, [])
        reporter.stats[key] = [report for report in reports if report.nodeid not in unstable]
        reporter.stats.setdefault("unstable", []).extend(report for report in reports if report.nodeid in unstable)


def _passes_alone(test: str, root: Path, folder: Path, reporter: TerminalReporter) -> bool:
    kept = folder / re.sub(r"\W+", "_", test)[-150:]
    kept.mkdir(parents=True)
    reports = [report for key in ("failed", "error") for report in reporter.stats.get(key, []) if report.nodeid == test]
    (kept / "first.txt").write_text("\n\n".join(_text(report) for report in reports))
    with (kept / "again.txt").open("w") as output:
        passed = _run_alone(test, root, output.fileno()) == pytest.ExitCode.OK
    outcome = "passed alone: unstable" if passed else "failed again"
    reporter.write_line(f"{test} {outcome}; both outputs: {kept.relative_to(root)}", red=not passed, yellow=passed)
    return passed


def _run_alone(test: str, root: Path, output: int) -> int | None:
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", test]
    # Options there may be of the whole run, such as the file for its report.
    environment = {name: value for name, value in os.environ.items() if name != "PYTEST_ADDOPTS"}
    try:
        return subprocess.run(
            command, cwd=root, env=environment, stdout=output, stderr=output, timeout=PATIENCE, check=False
        ).returncode
    except subprocess.TimeoutExpired:
        return None


def _text(report: pytest.TestReport) -> str:
    sections = [f"--- {name}\n{content}" for name, content in report.sections]
    return "\n\n".join([f"{report.nodeid} ({report.when})", report.longreprtext, *sections])
