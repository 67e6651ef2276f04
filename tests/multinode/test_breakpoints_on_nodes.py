"""Breakpoints of the page on ranks of another machine, whose loopback and folders the notebook does not see."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from testbed.kernel import Kernel, lines_by_rank
from tests.conftest import sharing
from tests.multinode.hosts import two_hosts, with_name_and_without
from tests.multinode.nodes import Node, two_nodes, without_nodes
from tests.support.page_debugger import PageDebugger, adapters, page_debugger

CELL = """\
%%distributed
def scale(by):
    held = by * 10
    return held
print(scale(rank + 1))
"""
LOOP = """\
%%distributed
import time
for turn in range(10_000):
    time.sleep(0.01)
"""


@pytest.fixture(scope="module")
def debugged() -> Iterator[tuple[Kernel, Node]]:
    """A kernel with its debugger on, and two ranks on each of two hosts."""
    with two_hosts() as hosts, Kernel(hosts[0].command) as kernel, sharing(kernel):
        kernel.ok("%load_ext nbdist")
        PageDebugger(kernel).close()  # what it has started lives as long as the kernel
        (adapter,) = adapters()
        two = two_nodes(kernel, hosts[0].address, hosts[1])
        with sharing(psutil.Process(adapter)), two as node, sharing(node):
            yield kernel, node


@pytest.fixture
def page(debugged: tuple[Kernel, Node]) -> Iterator[PageDebugger]:
    with page_debugger(debugged[0]) as found:
        yield found


def test_a_breakpoint_stops_the_ranks_of_all_machines(debugged: tuple[Kernel, Node], page: PageDebugger) -> None:
    kernel, _ = debugged
    page.break_at(CELL, 4)
    cell = kernel.start(CELL)
    threads = page.stops(4)
    assert sorted(threads) == [f"rank {rank}" for rank in range(4)]
    frames = page.stack(threads["rank 3"])
    assert [(frame["name"], frame["line"]) for frame in frames[:2]] == [("rank 3: scale", 4), ("rank 3: <module>", 5)]
    assert page.variables(frames[0])["held"] == "40"
    assert page.ask("evaluate", expression="held + by", frameId=frames[0]["id"])["result"] == "44"
    large = page.ask("evaluate", expression="'x' * 1_000_000", frameId=frames[0]["id"], context="clipboard")
    assert len(large["result"]) > 1_000_000
    for rank in (3, 0, 1, 2):  # the one whose variables were seen last goes on first
        page.ask("continue", threadId=threads[f"rank {rank}"])
        assert page.event("continued")["threadId"] == threads[f"rank {rank}"]
    assert lines_by_rank(without_nodes(cell.finish().stdout)) == {rank: [f"{rank + 1}0"] for rank in range(4)}


def test_an_interrupt_passes_over_the_breakpoints_of_all_machines(
    debugged: tuple[Kernel, Node], page: PageDebugger
) -> None:
    kernel, _ = debugged
    page.break_at(LOOP, 4)
    cell = kernel.start(LOOP)
    page.stops(4)
    kernel.interrupt()
    assert cell.finish().ename == "KeyboardInterrupt"


def test_ranks_stop_where_their_machine_has_no_file_of_the_cell(tmp_path: Path) -> None:
    with Kernel() as kernel:
        kernel.ok(f"%load_ext nbdist\nimport tempfile\ntempfile.tempdir = {str(tmp_path)!r}")
        with two_nodes(kernel, host=with_name_and_without("node-b", tmp_path)), page_debugger(kernel) as page:
            one = CELL.replace("%%distributed", "%%distributed -r 2")
            page.break_at(one, 4)
            assert page.paths[one].startswith(str(tmp_path))
            cell = kernel.start(one)
            thread = page.stops(1)["rank 2"]
            frame = page.stack(thread)[0]
            assert (frame["name"], frame["line"]) == ("rank 2: scale", 4)
            assert frame["source"]["path"] == page.paths[one]
            page.ask("continue", threadId=thread)
            assert cell.finish().status == "ok"


def test_ranks_of_a_machine_that_is_lost_are_no_longer_stopped(
    debugged: tuple[Kernel, Node], page: PageDebugger
) -> None:
    kernel, node = debugged
    page.break_at(CELL, 4)
    cell = kernel.start(CELL)
    threads = page.stops(4)
    os.kill(node.pid, signal.SIGKILL)
    left = {threads["rank 2"], threads["rank 3"]}
    while left:
        left.discard(page.event("continued")["threadId"])
    assert cell.finish().ename == "RankDied"
    assert page.ask("debugInfo")["stoppedThreads"] == []
