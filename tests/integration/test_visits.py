"""`nbdist ls` and `nbdist stop`: sessions seen and ended from a terminal."""

from __future__ import annotations

import re
import subprocess
import sys

import psutil

from testbed.kernel import Kernel, wait_until


def nbdist(*arguments: str, code: int = 0) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "nbdist", *arguments], check=False, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


def row_of(kernel: Kernel) -> list[str]:
    """The columns of `nbdist ls` for the session of a notebook; empty if it shows none."""
    rows = [re.split(r"  +", line) for line in nbdist("ls").splitlines()]
    return next((row for row in rows if len(row) > 1 and row[1] == str(kernel.pid)), [])


def test_a_session_is_listed_with_what_it_runs(own_ranks: Kernel) -> None:
    assert row_of(own_ranks)[3] == "2" and row_of(own_ranks)[7] == "nothing"
    cell = own_ranks.start("%%distributed\nimport time\nprint('at it')\ntime.sleep(1000)")
    cell.wait_for_ranks(2, "at it")
    assert re.fullmatch(r"cell \d+ for \d+ s", row_of(own_ranks)[7])
    own_ranks.interrupt()
    cell.finish()


def test_a_session_that_is_stopped_says_so_in_its_notebook_and_can_be_started_again(own_ranks: Kernel) -> None:
    ranks = own_ranks.rank_pids()
    cell = own_ranks.start("%%distributed\nimport time\nprint('at it')\ntime.sleep(1000)")
    cell.wait_for_ranks(2, "at it")
    name = row_of(own_ranks)[0]
    assert nbdist("stop", name[:6]) == f"session {name} has ended\n"
    outcome = cell.finish()
    assert outcome.ename == "SessionBroken" and "ended by `nbdist stop`" in outcome.evalue, str(outcome)
    wait_until(lambda: not any(map(psutil.pid_exists, ranks)), "ranks to end")
    assert row_of(own_ranks) == []
    assert "2 ranks ready" in own_ranks.ok("%distributed start -n 2").stdout


def test_a_notebook_that_has_no_ranks_yet_is_not_listed(own_ranks: Kernel) -> None:
    own_ranks.ok("%distributed stop")
    assert row_of(own_ranks) == []


def test_what_can_not_be_stopped_is_refused(own_ranks: Kernel) -> None:
    assert "there is no session 'nowhere'" in nbdist("stop", "nowhere", code=2)
    assert "or pass --all" in nbdist("stop", code=2)
    assert row_of(own_ranks)
