"""A session over two machines whose notebook crashes, and that another notebook takes over."""

from __future__ import annotations

import os
import platform
import signal
from collections.abc import Iterator

import pytest

from nbdist.visits import of_this_machine
from testbed.kernel import Kernel, lines_by_rank, wait_until
from tests.multinode.nodes import SUM, Node, two_nodes, without_nodes
from tests.support.page_debugger import PageDebugger, page_debugger

STOPPED = "%%distributed\nheld = rank + 1\nprint(held * 10)"
LOOP = "%%distributed\nimport time\nprint('begun', flush=True)\nwhile True: time.sleep(0.01)"


@pytest.fixture
def other() -> Iterator[Kernel]:
    """The notebook that attaches."""
    with Kernel(NBDIST_PREWARM="0") as kernel:
        kernel.ok("%load_ext nbdist")
        yield kernel


@pytest.fixture
def node(other: Kernel) -> Iterator[Node]:
    """The other machine of a session whose notebook has crashed while all ranks worked; `other` has it in the end."""
    with Kernel() as first:
        first.ok("%load_ext nbdist")
        with two_nodes(first, arguments="--linger 60") as node:
            first.ok("%%distributed --setup\nkept = rank * 10")
            first.start(LOOP).wait_for("begun")
            os.kill(first.pid, signal.SIGKILL)
            wait_until(lambda: [each for each in of_this_machine() if each.left == "crashed"], "the end to be seen")
            yield node
            other.run("%distributed stop")


def test_the_cell_goes_on_on_all_machines_and_can_be_interrupted(node: Node, other: Kernel) -> None:
    attach = other.start("%distributed attach --wait")
    attach.wait_for_ranks(4, "begun")
    other.interrupt()
    assert "interrupted" in attach.finish().evalue
    assert "4 ranks on cpu" in attach.outcome.stdout
    assert other.ok("%%distributed\nprint(kept)").lines == {rank: [str(rank * 10)] for rank in range(4)}
    assert other.ok(f"%%distributed\n{SUM}").lines == {rank: ["10"] for rank in range(4)}
    assert other.ok(f"%%distributed -r @{platform.node()}#1\nprint(rank)").lines == {2: ["2"], 3: ["3"]}


def test_a_machine_that_is_lost_meanwhile_is_reported_and_the_others_keep_their_variables(
    node: Node, other: Kernel
) -> None:
    os.kill(node.agent(), signal.SIGKILL)
    wait_until(lambda: [each for each in of_this_machine() if each.description and not each.description.running], "it")
    shown = other.ok("%distributed attach").stdout
    assert "ranks 2-3" in shown, shown
    other.ok("%distributed shrink")
    assert other.ok("%%distributed\nprint(kept)").lines == {0: ["0"], 1: ["10"]}


def test_ranks_of_all_machines_that_stood_at_a_breakpoint_go_on_and_stop_at_those_of_the_next_notebook(
    other: Kernel,
) -> None:
    with Kernel() as first:
        first.ok("%load_ext nbdist")
        with two_nodes(first, arguments="--linger 60"):
            page = PageDebugger(first)
            page.break_at(STOPPED, 3)
            first.start(STOPPED)
            page.stops(4)
            os.kill(first.pid, signal.SIGKILL)
            page.leave()
            wait_until(lambda: [each for each in of_this_machine() if each.left == "crashed"], "the end to be seen")
            missed = other.ok("%distributed attach --wait").stdout.splitlines(keepends=True)
            expected = {rank: [f"{rank + 1}0"] for rank in range(4)}
            assert lines_by_rank(without_nodes("".join(line for line in missed if line.startswith("[")))) == expected
            with page_debugger(other) as page:
                page.break_at(STOPPED, 3)
                cell = other.start(STOPPED)
                for thread in page.stops(4).values():
                    page.ask("continue", threadId=thread)
                assert lines_by_rank(without_nodes(cell.finish().stdout)) == expected
            other.run("%distributed stop")
