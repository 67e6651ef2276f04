"""Notebooks and terminals that follow a session which another notebook drives."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from testbed.kernel import Execution, Kernel, kernel_with_ranks, ranks_with_line
from tests.conftest import sharing
from tests.support.cells import gated
from tests.support.roles import find


@pytest.fixture(scope="module")
def driver() -> Iterator[Kernel]:
    """The notebook that has the ranks."""
    with kernel_with_ranks(2, NBDIST_PREWARM="0") as kernel, sharing(kernel):
        yield kernel


@pytest.fixture(scope="module")
def follower(driver: Kernel) -> Iterator[Kernel]:
    """Another notebook."""
    with Kernel(NBDIST_PREWARM="0") as kernel, sharing(kernel):
        kernel.ok("%load_ext nbdist")
        yield kernel


def following(kernel: Kernel) -> Execution:
    """The cell below which a kernel shows what another one drives."""
    cell = kernel.start("%distributed follow")
    assert "following session" in cell.finish().stderr
    return cell


def test_what_runs_is_shown_from_its_beginning_and_then_as_it_comes(
    driver: Kernel, follower: Kernel, tmp_path: Path
) -> None:
    cell = driver.start(gated(tmp_path, "print('done')"))
    cell.wait_for("begun")
    follow = following(follower)
    follow.wait_late_for_ranks(2, "begun")
    (tmp_path / "go").touch()
    cell.finish()
    follow.wait_late("has ended")
    shown = follow.outcome.stdout + follow.outcome.stderr
    assert f"2 ranks, driven by pid {driver.pid}" in shown and " on ranks 0-1: import os, time" in shown
    assert ranks_with_line(shown, "begun") == ranks_with_line(shown, "done") == [0, 1]


def test_a_cell_that_fails_is_shown_with_the_error_that_came_first(driver: Kernel, follower: Kernel) -> None:
    follow = following(follower)
    driver.fails("%%distributed\nif rank == 1:\n    print('before it')\n    1 / 0", "RankError")
    follow.wait_late("ZeroDivisionError: division by zero")
    follow.wait_late("[1] before it")
    assert "rank 0: finished" in follow.outcome.stderr


def test_who_follows_runs_nothing_on_the_ranks_until_it_takes_them(driver: Kernel, follower: Kernel) -> None:
    follower.ok("%distributed follow")
    refused = follower.fails("%%distributed\nx = 1", "SessionClosed").evalue
    assert refused.startswith("this notebook follows session ") and f"which is driven by pid {driver.pid}" in refused
    assert refused.endswith(" --take` takes it over")
    follower.ok(refused.split("`")[1])
    assert follower.ok("%%distributed\nprint(rank)").lines == {0: ["0"], 1: ["1"]}
    follow = following(driver)
    follower.ok("%%distributed -r 1\nprint('mine now')")
    follow.wait_late("[1] mine now")
    driver.ok("%distributed attach --take")


def test_a_session_that_is_slow_to_answer_is_named_and_shown_once(
    driver: Kernel, follower: Kernel, tmp_path: Path
) -> None:
    cell = driver.start(gated(tmp_path, "print('done')"))
    cell.wait_for("begun")
    follow = following(follower)
    follow.wait_late("begun")
    controller = psutil.Process(find(driver.pid, "controller"))
    controller.suspend()
    try:
        (tmp_path / "go").touch()
        follow.wait_late("does not answer")
    finally:
        controller.resume()
    cell.finish()
    follow.wait_late("has ended")
    assert ranks_with_line(follow.outcome.stdout, "done") == [0, 1]


def test_following_can_be_ended_and_nothing_is_left_to_refuse(driver: Kernel, follower: Kernel) -> None:
    following(follower)
    follower.ok("%distributed follow --stop")
    assert "follows" not in follower.fails("%%distributed\n1", "SessionClosed").evalue


def test_a_terminal_follows_until_the_session_ends() -> None:
    with contextlib.ExitStack() as stack, contextlib.ExitStack() as notebook:
        kernel = notebook.enter_context(kernel_with_ranks(1, NBDIST_PREWARM="0"))
        name = kernel.ok("import nbdist; print(nbdist.get_session().name)").stdout.strip()
        command = [sys.executable, "-u", "-m", "nbdist", "follow", name]
        terminal = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        stack.enter_context(terminal)
        stack.callback(terminal.kill)
        lines = iter(terminal.stdout or ())
        assert next(lines).startswith(f"nbdist: following session {name}: 1 rank, driven by ")
        kernel.ok("%%distributed\nprint('hello')")
        assert next(lines).endswith("on rank 0: print('hello')\n")
        assert next(lines) == "[0] hello\n"
        assert next(lines).endswith("has ended\n")
        kernel.ok("%distributed stop")
        assert next(lines) == f"nbdist: session {name} no longer has ranks\n"
        notebook.close()
        assert list(lines) == [f"nbdist: session {name} has ended\n"] and terminal.wait(10) == 0


def test_without_another_session_there_is_nothing_to_follow(driver: Kernel) -> None:
    assert "there is no session to follow" in driver.fails("%distributed follow", "UsageError").evalue
