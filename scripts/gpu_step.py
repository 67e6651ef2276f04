"""Run a check or a benchmark on a GPU, with a limit, and judge it; several at once where several threads do so.

Each is a process group of its own with files of its own. All that it starts carries a mark in its environment, so that
nothing outlives it. Independent of which there are, in which order they run and where results are kept.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from xml.etree import ElementTree

from gpu_parts import CHECK, ROOT, Step
from gpu_results import FAILED, HUNG, NO_GPU, PASSED, SKIPPED, Result

LEAST = 5.0  # seconds; with less time left no step begins
_MARK = "NBDIST_GPU_RUN"  # in the environment of all that a step starts
# Together well below the five seconds in which a run is over after its deadline.
_LAST_WORDS = 2.0  # seconds in which what hangs may show where
_DEATH = 1.0  # seconds in which what was killed is gone; a driver that hangs may hold it for longer
_LINES = 15  # of a failure, on the page


class Runner:
    """Runs steps until a deadline, or until it is told to end; from any thread."""

    def __init__(self, out: Path, environment: dict[str, str], deadline: float) -> None:
        """Run nothing yet.

        Args:
            out: The folder of log.txt.
            environment: The variables of all steps.
            deadline: When all of them are ended, in seconds of the monotonic clock.
        """
        self.out = out
        self._environment = environment
        self._deadline = deadline
        self._mark = secrets.token_hex(8)
        self._ended = False
        self._starting = threading.Lock()  # what starts is marked before end() looks for it, or does not start
        self._logging = threading.Lock()

    def left(self) -> float:
        """Return how many seconds there are until the deadline; 0 after it."""
        return max(0.0, self._deadline - time.monotonic())

    def end(self) -> None:
        """End all that runs, in all threads; nothing more begins."""
        with self._starting:
            self._ended = True
        end_all(self._mark)

    @contextlib.contextmanager
    def ended_on_error(self) -> Iterator[None]:
        """End all that runs when the block is left by an exception, Ctrl-C included."""
        try:
            yield
        except BaseException:
            self.end()
            raise

    def perform(self, step: Step, with_gpu: bool) -> Result | None:
        """Run a step and judge it by its exit code, and a check by pytest's own report.

        Returns:
            What became of it; None where the run was over first.
        """
        left = self.left()
        if left < LEAST:
            return None
        with _temporary_folder(self.out) as folder:
            began, limit = time.monotonic(), min(step.limit, left)
            code, output = self._execute(step, limit, folder)
            seconds = round(time.monotonic() - began, 1)
            report = folder / "report.xml"
            found = report.read_text(encoding="utf-8") if report.exists() else ""
        if self._ended or (code is None and left < step.limit):
            return None
        result = Result(FAILED, seconds, step.name, step.part, step.kind)
        if found:
            result.status, result.why, result.figures = judged(found)
        if code == 0 and step.kind != CHECK:
            result.status, result.lines = PASSED if with_gpu else NO_GPU, output.splitlines()
        if code != 0:
            result.status = HUNG if code is None else FAILED
            result.why = f"over {limit:.0f} s" if code is None else f"exit code {code}"
            result.lines = output.splitlines()[-_LINES:]
        if result.status == NO_GPU and with_gpu:
            result.status, result.why = FAILED, "torch finds a GPU here, and this check found none"
        return result

    def ask(self, step: Step) -> tuple[int | None, str]:
        """Run a step; return its exit code, None when it was ended at its limit, and what it printed."""
        with _temporary_folder(self.out) as folder:
            return self._execute(step, min(step.limit, self.left()), folder)

    def _execute(self, step: Step, limit: float, folder: Path) -> tuple[int | None, str]:
        """Run a step in a process group of its own; nothing that it started is left."""
        mark = f"{self._mark}.{secrets.token_hex(4)}"
        with (folder / "output.txt").open("w+b") as output:
            process = self._start(command_of(step, folder), mark, output.fileno())
            if process is None:
                return None, ""
            try:
                code = ended_within(process, limit)
            finally:
                end_all(mark)
            output.seek(0)
            text = output.read().decode("utf-8", errors="replace")
        with self._logging, (self.out / "log.txt").open("a", encoding="utf-8") as log:
            log.write(f"\n===== {step.part}: {step.name}\n{text}")
        return code, text

    def _start(self, command: Sequence[str], mark: str, output: int) -> subprocess.Popen[bytes] | None:
        with self._starting:
            if self._ended:
                return None
            return subprocess.Popen(
                command,
                cwd=ROOT,
                env={**self._environment, _MARK: mark},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )


@contextlib.contextmanager
def _temporary_folder(parent: Path) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix=".step-", dir=parent, ignore_cleanup_errors=True) as name:
        yield Path(name)


def command_of(step: Step, folder: Path) -> list[str]:
    """Return how to run a step; pytest's report is in the folder then."""
    if step.kind != CHECK:
        return [sys.executable, step.target]
    # A warning that only this machine's versions give is for people to read, not a failure.
    pytest = [sys.executable, "-m", "pytest", "-q", "--tb=short", "-W", "default", "-p", "no:cacheprovider"]
    return [*pytest, "-o", "junit_family=xunit1", f"--junitxml={folder / 'report.xml'}", step.target]


def judged(report: str) -> tuple[str, str, dict[str, str]]:
    """Return status, reason and figures of tests that did not fail, from pytest's XML report."""
    cases = list(ElementTree.fromstring(report).iter("testcase"))
    figures = {each.get("name", ""): each.get("value", "") for case in cases for each in case.iter("property")}
    skips = [case.find("skipped") for case in cases]
    reasons = [skip.get("message", "") for skip in skips if skip is not None]
    if len(reasons) < len(cases) or not reasons:
        return PASSED, "; ".join(dict.fromkeys(reasons)), figures
    if set(reasons) == {NO_GPU}:
        return NO_GPU, "", figures
    return SKIPPED, "; ".join(dict.fromkeys(reasons)), figures


def ended_within(process: subprocess.Popen[bytes], limit: float) -> int | None:
    """Return the exit code of a process; None when it had to be ended after so many seconds."""
    try:
        return process.wait(limit)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGABRT)  # pytest shows where each thread is
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_LAST_WORDS)
        return None
    finally:
        if process.returncode is None:
            os.killpg(process.pid, signal.SIGKILL)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_DEATH)


def end_all(mark: str) -> None:
    """End the processes whose mark begins like this, those that have left their process group included."""
    ended: set[int] = set()
    while found := marked(mark) - ended:  # again: what it had started meanwhile
        for pid in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        ended |= found


def marked(mark: str) -> set[int]:
    """Return the processes whose mark begins like this."""
    wanted, found = f"{_MARK}={mark}".encode(), set()
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended, or is somebody else's
            if any(each.startswith(wanted) for each in (entry / "environ").read_bytes().split(b"\0")):
                found.add(int(entry.name))
    return found
