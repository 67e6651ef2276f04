"""When the allocation is expected to end: what the user says, or else the scheduler."""

from __future__ import annotations

import os
import subprocess
import time
from dataclasses import dataclass, replace

from nbdist.base.text import parse_clock, parse_time_left
from nbdist.client.start.start_settings import StartSettings
from nbdist.cluster.launchers import END_VARIABLE, job_end
from nbdist.errors import UsageError

_ASK_LIMIT = 20.0  # seconds for the user's command
_MUST_PRINT = "It must print how long the allocation lasts: seconds, or [D-]HH:MM:SS"


@dataclass(frozen=True)
class ExpectedEnd:
    """An end that is known before it is announced.

    Attributes:
        at: By `time.time`; infinite: there is none.
        source: Who says so.
        command: What prints how long it is until then; "": it does not change.
    """

    at: float
    source: str
    command: str = ""

    def is_later_job(self, other: ExpectedEnd) -> bool:
        """Return whether this is the end of a job, and another job ends before."""
        return self.source == END_VARIABLE and self.at > other.at

    def asked_again(self) -> ExpectedEnd:
        """Return what the command prints now. If it fails, nothing has changed."""
        try:
            return replace(self, at=time.time() + _time_left(self.command)) if self.command else self
        except UsageError:
            return self


def expected_end(settings: StartSettings) -> ExpectedEnd | None:
    """Return the end that the settings or this process's environment name; None: they name none.

    Raises:
        UsageError: They contradict one another, or the user's command does not tell.
    """
    if settings.until is not None and settings.time_left is not None:
        raise UsageError("until and time_left both say when the allocation ends: use only one of them")
    if settings.until is not None:
        at = parse_clock(settings.until, time.time())
        assert at is not None  # the settings are checked
        return ExpectedEnd(at, f"--until {settings.until}")
    if settings.time_left is not None:
        return ExpectedEnd(time.time() + _time_left(settings.time_left), "--time-left", settings.time_left)
    return end_of_job(job_end(os.environ))


def end_of_job(at: float | None) -> ExpectedEnd | None:
    """Return the end of a job as its scheduler has it."""
    return None if at is None else ExpectedEnd(at, END_VARIABLE)


def _time_left(command: str) -> float:
    """Ask the user's command.

    Raises:
        UsageError: It fails, or prints something else.
    """
    what = f"time_left: `{command}`"
    try:
        done = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=_ASK_LIMIT, check=False)
    except subprocess.TimeoutExpired:
        raise UsageError(f"{what} has not ended within {_ASK_LIMIT:g} s. {_MUST_PRINT}") from None
    if done.returncode:
        why = (done.stderr.strip().splitlines() or ["it printed no reason"])[-1]
        raise UsageError(f"{what} failed with exit code {done.returncode}: {why}. {_MUST_PRINT}")
    seconds = parse_time_left(done.stdout)
    if seconds is None:
        raise UsageError(f"{what} printed {done.stdout.strip()[:80]!r}. {_MUST_PRINT}")
    return seconds
