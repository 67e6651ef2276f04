"""The end of a node's job: known from its environment, and announced by signals to its `nbdist join`."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from testbed.kernel import Execution, Kernel
from tests.multinode.nodes import Node, invitations, joined, lines_of, start


@pytest.fixture
def kernel() -> Iterator[Kernel]:
    with Kernel() as found:
        found.ok("%load_ext nbdist")
        yield found


@contextmanager
def session(kernel: Kernel, flags: str = "", ends_at: str = "") -> Iterator[tuple[Node, Execution]]:
    """A session with a rank here and one on a node whose job ends then; and the cell that has started it."""
    cell = start(kernel, arguments=f"-n 1 {flags}")
    address, (token,) = invitations(cell)
    with joined(address, token, SLURM_JOB_END_TIME=ends_at) as node:
        cell.finish()
        yield node, cell
        kernel.ok("%distributed stop")


def test_the_first_end_of_a_job_counts(kernel: Kernel) -> None:
    with session(kernel, ends_at=str(int(time.time()) + 7230)) as (_, cell):
        assert "the allocation ends in 2 h, at " in cell.outcome.stdout, str(cell.outcome)
        assert "(SLURM_JOB_END_TIME)" in kernel.ok("%distributed status").stdout


def test_a_warning_to_the_process_that_has_joined_is_passed_on(kernel: Kernel) -> None:
    with session(kernel) as (node, _):
        cell = kernel.start("%%distributed\nkept = rank")
        cell.finish()
        os.kill(node.pid, signal.SIGUSR1)
        cell.wait_late(f"SIGUSR1 has reached the session's agent (pid {node.agent()}) on ")
        assert lines_of(kernel, "print(kept)") == {0: ["0"], 1: ["1"]}


def test_sigterm_to_the_process_that_has_joined_leaves_the_grace(kernel: Kernel) -> None:
    with session(kernel, "--end-grace 3") as (node, _):
        cell = kernel.start("%%distributed\nkept = rank")
        cell.finish()
        os.kill(node.pid, signal.SIGTERM)
        cell.wait_late(f"SIGTERM has reached the session's agent (pid {node.agent()}) on ")
        assert lines_of(kernel, "print(kept)") == {0: ["0"], 1: ["1"]}
        assert "left the session" in node.end()
        assert "rank 1" in kernel.run("%%distributed\nkept").evalue


def test_without_a_grace_sigterm_leaves_at_once(kernel: Kernel) -> None:
    with session(kernel) as (node, _):
        os.kill(node.pid, signal.SIGTERM)
        assert "left the session" in node.end()
