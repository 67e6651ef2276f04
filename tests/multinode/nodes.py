"""Machines that join a notebook's session by `nbdist join`, and sessions with them."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

from testbed.kernel import Execution, Kernel, lines_by_rank
from tests.multinode.hosts import Host, OtherMachine

SUM = """
import torch, torch.distributed as dist
total = torch.ones(1) * (rank + 1)
dist.all_reduce(total)
print(int(total))
"""


@dataclass
class Node:
    """A machine that has joined: the process of `nbdist join` there."""

    process: subprocess.Popen[str]

    @property
    def pid(self) -> int:
        return self.process.pid

    def agent(self) -> int:
        """The process id of its agent."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        return int(children[0])

    def end(self) -> str:
        """What it has printed, once it has ended by itself."""
        return self.process.communicate(timeout=30)[0]


@contextmanager
def joined(
    address: str, token: str, host: Host | OtherMachine | None = None, *, folder: Path | None = None, **environment: str
) -> Iterator[Node]:
    """A node that joins with this token."""
    command = [*(host.command if host is not None else []), sys.executable, "-m", "nbdist", "join", address]
    process = subprocess.Popen(
        command,
        env={**os.environ, "NBDIST_TOKEN": token, "ONLY_THERE": "yes", **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=folder,
    )
    try:
        yield Node(process)
    finally:
        if process.poll() is None:
            process.terminate()
        process.communicate(timeout=30)


def invitations(cell: Execution, count: int = 1) -> tuple[str, list[str]]:
    """The address and the tokens that a start prints."""
    cell.wait_until(lambda outcome: outcome.stdout.count("nbdist join") >= count, "lines to paste")
    found = re.findall(r"NBDIST_TOKEN=(\S+) nbdist join (\S+)", cell.outcome.stdout)
    return found[0][1], [token for token, _ in found]


def start(kernel: Kernel, address: str = "127.0.0.1", arguments: str = "-n 2") -> Execution:
    return kernel.start(f"%distributed start --num-nodes 2 --master-addr {address} {arguments}")


@contextmanager
def two_nodes(
    kernel: Kernel,
    address: str = "127.0.0.1",
    host: Host | OtherMachine | None = None,
    arguments: str = "",
    **environment: str,
) -> Iterator[Node]:
    """A session with two ranks on each of two nodes."""
    cell = start(kernel, address, f"-n 2 {arguments}")
    where, (token,) = invitations(cell)
    with joined(where, token, host, folder=None, **environment) as node:
        outcome = cell.finish()
        assert outcome.status == "ok", str(outcome)
        assert "4 ranks on 2 nodes ready" in outcome.stdout, str(outcome)
        try:
            yield node
        finally:
            if kernel.manager.is_alive():
                kernel.run("%distributed stop")


def lose(kernel: Kernel, node: Node) -> None:
    """Lose a machine, whose `nbdist join` is asked to leave, under a cell."""
    cell = kernel.start("%%distributed\nprint('at it')\nimport time\nif rank > 1: time.sleep(100)")
    cell.wait_for_ranks(4, "at it")
    node.process.send_signal(signal.SIGINT)
    assert cell.finish().ename == "RankDied"
    node.end()


def kill_node(kernel: Kernel, rank: int) -> None:
    """Kill `nbdist join`, under a cell, where a rank runs whose machine is to be lost."""
    pid = kernel.value(f"__import__('nbdist').get_session().ranks[{rank}].pid")
    parents = psutil.Process(pid).parents()
    node = next(parent for parent in parents if re.search(r"nbdist\.command|nbdist join", " ".join(parent.cmdline())))
    cell = kernel.start(f"%%distributed\nprint('at it')\nimport time\nif rank == {rank}: time.sleep(1000)")
    cell.wait_for("] at it")
    node.kill()
    outcome = cell.finish()
    assert outcome.ename == "RankDied" and "is lost" in str(outcome), str(outcome)


def without_nodes(text: str) -> str:
    """The text with labels that name ranks only."""
    return re.sub(r"(?m)^(\[[0-9,-]+\]) \([^)]*\)", r"\1", text)


def lines_of(kernel: Kernel, cell: str) -> dict[int, list[str]]:
    """The lines that each rank prints in a cell, without the names of the nodes."""
    return lines_by_rank(without_nodes(kernel.ok(f"%%distributed\n{cell}").stdout))
