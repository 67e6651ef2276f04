"""When an allocation ends: what users type, what Slurm prints, and when it is said."""

from __future__ import annotations

import math
import time
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from nbdist.base.text import parse_clock, parse_time_left
from nbdist.client.start.expected_end import expected_end
from nbdist.client.start.start_settings import StartSettings
from nbdist.cluster.launchers import job_end
from nbdist.errors import UsageError

NOON = datetime(2030, 5, 6, 12, 0).timestamp()


@pytest.mark.parametrize(
    ("text", "at"),
    [
        ("18:00", datetime(2030, 5, 6, 18, 0)),
        ("12:00:01", datetime(2030, 5, 6, 12, 0, 1)),
        ("12:00", datetime(2030, 5, 7, 12, 0)),
        ("9:30", datetime(2030, 5, 7, 9, 30)),
        ("2030-05-08T06:00", datetime(2030, 5, 8, 6, 0)),
        ("2030-05-08 06:00", datetime(2030, 5, 8, 6, 0)),
        ("2030-05-08T06:00:00+00:00", datetime.fromisoformat("2030-05-08T06:00:00+00:00")),
        ("2030-05-08T06:00:00Z", datetime.fromisoformat("2030-05-08T06:00:00+00:00")),
    ],
)
def test_a_clock_or_a_date_is_a_moment(text: str, at: datetime) -> None:
    assert parse_clock(text, NOON) == at.timestamp()


@pytest.mark.parametrize("text", ["", "24:00", "18:60", "18", "6pm", "tomorrow", "2030-13-01"])
def test_anything_else_is_none(text: str) -> None:
    assert parse_clock(text, NOON) is None


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("3600\n", 3600),
        ("90.5", 90.5),
        ("0", 0),
        ("59:59", 3599),
        ("2:03:04\n", 7384),
        ("1-02:03:04", 93784),
        ("UNLIMITED", math.inf),
        ("NOT_SET", None),
        ("INVALID", None),
        ("-5", None),
        ("", None),
    ],
)
def test_seconds_or_slurms_format_is_the_time_left(text: str, seconds: float | None) -> None:
    assert parse_time_left(text) == seconds


@pytest.mark.parametrize(
    ("variables", "left"),
    [
        ({"SLURM_JOB_END_TIME": "+600"}, 600),
        ({"SLURM_JOB_END_TIME": "-600"}, None),  # of a job that is over
        ({"SLURM_JOB_END_TIME": "+31536000"}, None),  # of one without a limit
        ({"SLURM_JOB_END_TIME": "soon"}, None),
        ({}, None),
    ],
)
def test_a_jobs_end_is_taken_from_slurm(variables: dict[str, str], left: int | None) -> None:
    now = int(time.time())
    given = {name: str(now + int(text)) if text[1:].isdecimal() else text for name, text in variables.items()}
    assert job_end(given) == (None if left is None else now + left)


def test_what_the_user_says_comes_before_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_END_TIME", str(int(time.time()) + 600))
    by_job, by_user = expected_end(StartSettings()), expected_end(StartSettings(time_left="echo 1:00:00"))
    assert by_job is not None and by_job.source == "SLURM_JOB_END_TIME"
    assert by_user is not None and 3590 < by_user.at - time.time() <= 3600 and by_user.source == "--time-left"


def test_a_command_is_asked_again_and_one_that_fails_then_changes_nothing(tmp_path: Path) -> None:
    file = tmp_path / "left"
    file.write_text("60")
    first = expected_end(StartSettings(time_left=f"cat {file}"))
    assert first is not None
    file.write_text("7200")
    put_off = first.asked_again()
    assert put_off.at > first.at + 7000
    file.unlink()
    assert put_off.asked_again() == put_off


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"until": "23:59", "time_left": "echo 1"}, "until and time_left both say when the allocation ends"),
        ({"time_left": "echo soon"}, "time_left: `echo soon` printed 'soon'. It must print how long the allocation"),
        ({"time_left": "echo no >&2; exit 3"}, "`echo no >&2; exit 3` failed with exit code 3: no. It must print"),
        ({"time_left": "exit 3"}, "failed with exit code 3: it printed no reason."),
    ],
)
def test_what_does_not_tell_is_one_error(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError) as caught:
        expected_end(StartSettings(**settings))
    assert says in str(caught.value)
