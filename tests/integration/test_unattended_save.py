"""A session without a client is saved before it ends, as with one, and `nbdist save` saves it at any time."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from testbed.kernel import Kernel, lines_by_rank, wait_until
from tests.integration.test_save_in_a_cell import SETUP, steps_of
from tests.support.leftovers import files_of_sessions
from tests.support.roles import await_end, family, find

HANG = 60.0


@pytest.fixture
def notebook_in(tmp_path: Path) -> Iterator[Kernel]:
    """A notebook in a new folder; its session has to have ended after the test."""
    with Kernel() as kernel:
        kernel.ok(f"%load_ext nbdist\nimport os, nbdist\nos.chdir({str(tmp_path)!r})")
        yield kernel
    command("stop", "--all")
    wait_until(lambda: not files_of_sessions(), "files to go", 30)


def train(kernel: Kernel, folder: Path, flags: str) -> int:
    """Have ranks train. Returns the controller's process."""
    kernel.ok(f"%distributed start -n 2 --save saves {flags}", HANG)
    kernel.ok(SETUP)
    kernel.ok("%%distributed --background --capture cell\ntrain(10**9)")
    wait_until((folder / "trains-0").exists, "the first step", 30)
    wait_until((folder / "trains-1").exists, "the first step", 30)
    return find(kernel.pid, "controller")


def leave_training(kernel: Kernel, folder: Path, flags: str) -> int:
    """Kill a notebook whose ranks train. Returns its controller's process."""
    controller = train(kernel, folder, flags)
    os.kill(kernel.pid, signal.SIGKILL)
    await_end([kernel.pid])
    return controller


def row() -> str:
    """The session's line of `nbdist ls`."""
    lines = command("ls").stdout.splitlines()
    return lines[1 + next(number for number, line in enumerate(lines) if line.startswith("session "))]


def session() -> str:
    return row().split()[0]


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-m", "nbdist", *arguments]
    return subprocess.run(line, capture_output=True, text=True, timeout=HANG, check=False)


def has_client() -> bool:
    return "crashed" not in row() and "detached" not in row()


def test_a_signal_saves_it_and_the_next_client_is_told(notebook_in: Kernel, tmp_path: Path) -> None:
    controller = leave_training(notebook_in, tmp_path, "--linger 300")
    os.kill(controller, signal.SIGUSR1)
    wait_until((tmp_path / "saves/save-1").exists, "the save", 30)
    steps = steps_of(tmp_path / "saves/save-1")
    with Kernel() as other:
        other.ok("%load_ext nbdist")
        wait_until(lambda: not has_client(), "the save's end", 30)
        assert f"saved {tmp_path}/saves/save-1" in other.ok("%distributed attach").stdout
        assert lines_by_rank(other.ok("%%distributed\nprint(step)").stdout) == {0: [str(steps)], 1: [str(steps)]}
        other.ok("%distributed stop")


def test_a_signal_that_ends_the_notebook_too_saves_it(notebook_in: Kernel, tmp_path: Path) -> None:
    controller = train(notebook_in, tmp_path, "--linger 300 --end-grace 60")
    os.kill(notebook_in.pid, signal.SIGSTOP)  # so that it can't save
    os.kill(controller, signal.SIGTERM)
    os.kill(notebook_in.pid, signal.SIGKILL)
    wait_until((tmp_path / "saves/save-1").exists, "the save", 30)
    assert steps_of(tmp_path / "saves/save-1") > 0


def test_ranks_to_which_nobody_comes_back_are_saved_before_they_end(notebook_in: Kernel, tmp_path: Path) -> None:
    everyone = family(leave_training(notebook_in, tmp_path, "--linger 16"))
    await_end(everyone, 60)
    assert steps_of(tmp_path / "saves/save-1") > 0
    assert sorted(os.listdir(tmp_path / "saves")) == ["save-1"]


def test_nbdist_save_saves_it_while_it_trains_and_leaves_it(notebook_in: Kernel, tmp_path: Path) -> None:
    leave_training(notebook_in, tmp_path, "--linger 300")
    done = command("save", session(), str(tmp_path / "other"))
    assert done.returncode == 0 and f"saved {tmp_path}/other/save-1" in done.stdout, done.stderr
    assert "cell" in command("ls").stdout  # it goes on
    assert command("stop", session()).returncode == 0


def test_a_session_that_has_a_client_is_refused(notebook_in: Kernel) -> None:
    notebook_in.ok("%distributed start -n 1", HANG)
    done = command("save", session(), "saves")
    assert done.returncode == 2 and "nbdist: session" in done.stderr, done.stdout
    notebook_in.ok("%distributed stop")
