"""Forks on Pythons whose child may be stuck before it has run a line."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from nbdist.launch.fork import forker
from nbdist.worker.processes import forks


class Forking:
    """As `os.fork`, but the first children do not come out of it.

    Attributes:
        stuck: Their process ids.
    """

    def __init__(self, count: int, fork: Callable[[], int] = os.fork) -> None:
        self._count = count
        self._fork = fork
        self.stuck: list[int] = []

    def __call__(self) -> int:
        child = self._fork()
        if len(self.stuck) < self._count:
            if child == 0:
                signal.pause()
            self.stuck.append(child)
        return child


@pytest.mark.parametrize("count", [0, 1, 2])
def test_stuck_children_are_ended_and_the_next_one_runs(count: int) -> None:
    forking = Forking(count)
    child = forks.fork_until_it_runs(forking, limit=0.05)
    if child == 0:
        os._exit(7)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    assert len(forking.stuck) == count
    assert not any(Path(f"/proc/{pid}").exists() for pid in forking.stuck)


def test_a_child_that_ends_at_once_is_its_parent_s_to_see() -> None:
    def fork() -> int:
        return os.fork() or os._exit(3)

    child = forks.fork_until_it_runs(fork, limit=60)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3


def test_an_interrupt_while_the_child_is_waited_for_leaves_no_child() -> None:
    class Interrupted(Exception):
        pass

    def interrupt(*_: object) -> None:
        raise Interrupted

    forking = Forking(1)
    old = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        with pytest.raises(Interrupted):
            forks.fork_until_it_runs(forking, limit=60)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, old)
    [child] = forking.stuck
    assert not Path(f"/proc/{child}").exists()


def test_a_child_that_begins_as_its_time_is_over_is_left_alone() -> None:
    """With no time at all, a child either has not begun, or is kept: none runs that is then replaced."""
    begun, begin = os.pipe()
    child = forks.fork_until_it_runs(os.fork, limit=0.0005)
    if child == 0:
        os.write(begin, b"1")
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert os.read(begun, 100) == b"1"
    os.close(begun)
    os.close(begin)


def test_a_stuck_child_is_replaced_where_sigchld_is_ignored() -> None:
    old = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        child = forks.fork_until_it_runs(Forking(1), limit=0.05)
        if child == 0:
            os._exit(0)
    finally:
        signal.signal(signal.SIGCHLD, old)
    assert child > 0


@pytest.fixture
def forking(monkeypatch: pytest.MonkeyPatch) -> Iterator[Forking]:
    """A Python with the defect, whose first child of this process is stuck."""
    forking = Forking(1, os.fork)
    monkeypatch.setattr(os, "fork", forking)
    monkeypatch.setattr(sys, "version_info", (3, 11, 9))
    yield forking


def test_a_rank_that_a_notebook_forks_is_replaced_when_it_is_stuck(forking: Forking) -> None:
    process = multiprocessing.get_context("fork").Process(target=os._exit, args=(7,))
    assert forker.start_process(process) is None
    assert os.waitstatus_to_exitcode(os.waitpid(process.pid or 0, 0)[1]) == 7
    assert len(forking.stuck) == 1


def test_a_notebooks_own_fork_is_as_before_when_its_rank_has_begun(forking: Forking) -> None:
    with forks.mended():
        assert os.fork is not forking
    assert os.fork is forking


def test_a_process_that_is_mended_twice_tries_as_if_once(forking: Forking) -> None:
    with forks.mended():
        mended = os.fork
        forks.mend()
        assert os.fork is mended


@pytest.mark.parametrize(
    ("version", "needed"),
    [((3, 10, 14), True), ((3, 10, 15), False), ((3, 11, 9), True), ((3, 11, 10), False), ((3, 12, 0), False)],
)
def test_only_pythons_with_the_defect_get_it(version: tuple[int, ...], needed: bool) -> None:
    assert forks.is_needed(version) is needed
