"""Breakpoints of the page on ranks: through the kernel's own debugger, as JupyterLab and VS Code ask it."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import psutil
import pytest

from testbed.kernel import Kernel
from tests.conftest import sharing
from tests.support.page_debugger import PageDebugger, adapters, page_debugger

CELL = """\
%%distributed
def scale(by):
    held = by * 10
    return held
total = scale(rank + 1)
print(total)
"""
ONE = """\
%%distributed --timeout 1
import torch.distributed as dist
value = torch.ones(1)
if rank == 1:
    value += 1
dist.all_reduce(value)
print(value.item())
"""
LOOP = """\
%%distributed
import time
for turn in range(10_000):
    time.sleep(0.01)
"""
LOCAL = """\
x = 1
y = x + 1
"""


@pytest.fixture(scope="module")
def debugged() -> Iterator[Kernel]:
    """A kernel whose debugger, once on, lives as long as it does."""
    with Kernel() as kernel, sharing(kernel):
        kernel.ok("%load_ext nbdist")
        PageDebugger(kernel).close()
        (adapter,) = adapters()
        with sharing(psutil.Process(adapter)):
            yield kernel


@pytest.fixture
def kernel(debugged: Kernel) -> Iterator[Kernel]:
    """It, with ranks of the test's own."""
    debugged.ok("%distributed start -n 2")
    debugged.ok("%%distributed\nimport torch")
    yield debugged
    debugged.ok("%distributed stop")


def names_of(page: PageDebugger, thread: int) -> list[tuple[str, int]]:
    return [(frame["name"], frame["line"]) for frame in page.stack(thread)]


def test_a_breakpoint_stops_ranks_and_jupyterlab_sees_the_stacks_of_all(kernel: Kernel) -> None:
    with page_debugger(kernel) as page:
        page.break_at(CELL, 4)
        cell = kernel.start(CELL)
        threads = page.stops(2)
        assert sorted(threads) == ["rank 0", "rank 1"]
        first = [("rank 0: scale", 4), ("rank 0: <module>", 5)]
        second = [("rank 1: scale", 4), ("rank 1: <module>", 5)]
        all_of_them = [("all stopped ranks: 0-1", 4)]
        assert names_of(page, threads["rank 0"]) == first + second + all_of_them
        frames = page.stack(threads["rank 1"])
        assert [(frame["name"], frame["line"]) for frame in frames] == second + first + all_of_them
        assert {frame["source"]["path"] for frame in frames} == {page.paths[CELL]}
        assert [page.variables(frames[index])["held"] for index in (0, 2)] == ["20", "10"]
        rich = page.ask("richInspectVariables", variableName="held", frameId=frames[0]["id"])
        assert rich["data"] == {"text/plain": "20"}
        assert page.ask("evaluate", expression="held + by", frameId=frames[2]["id"])["result"] == "11"
        page.ask("continue", threadId=threads["rank 0"])  # the rank whose frame was looked at last
        assert page.event("stopped")["threadId"] == threads["rank 1"]  # which JupyterLab shows next
        page.ask("continue", threadId=1)  # as JupyterLab calls every thread before 4.6
        assert cell.finish().lines == {0: ["10"], 1: ["20"]}


def test_ranks_step_and_go_on_together_while_the_frame_of_all_is_selected(kernel: Kernel) -> None:
    with page_debugger(kernel) as page:
        page.break_at(CELL, 3)
        cell = kernel.start(CELL)
        threads = page.stops(2)
        frame = page.stack(threads["rank 0"])[-1]
        assert page.variables(frame) == {"rank 0": "scale, line 3", "rank 1": "scale, line 3"}
        refusal = page.request("evaluate", expression="held", frameId=frame["id"])
        assert refusal["message"] == "select the frame of one rank for this"
        page.ask("next", threadId=threads["rank 0"])
        page.stops(2)
        first, *_ = page.stack(threads["rank 0"])
        assert (first["name"], first["line"]) == ("all stopped ranks: 0-1", 4)  # selected again
        assert page.variables(first) == {"rank 0": "scale, line 4", "rank 1": "scale, line 4"}
        page.ask("continue", threadId=threads["rank 0"])
        assert cell.finish().lines == {0: ["10"], 1: ["20"]}


def test_what_is_asked_late_of_a_frame_does_not_select_it_again(kernel: Kernel) -> None:
    with page_debugger(kernel) as page:
        page.break_at(CELL, 4)
        cell = kernel.start(CELL)
        threads = page.stops(2)
        frames = page.stack(threads["rank 0"])
        late, *_ = page.ask("scopes", frameId=frames[0]["id"])["scopes"]
        page.ask("scopes", frameId=frames[-1]["id"])
        page.ask("variables", variablesReference=late["variablesReference"])
        page.ask("continue", threadId=threads["rank 0"])
        assert cell.finish().lines == {0: ["10"], 1: ["20"]}


def test_going_on_is_for_one_rank_again_once_its_frame_is_selected(kernel: Kernel) -> None:
    with page_debugger(kernel) as page:
        page.break_at(CELL, 4)
        cell = kernel.start(CELL)
        threads = page.stops(2)
        frames = page.stack(threads["rank 0"])
        for frame in (frames[-1], frames[0]):
            page.variables(frame)
        page.ask("continue", threadId=threads["rank 0"])
        assert page.event("continued")["threadId"] == threads["rank 0"]
        assert page.ask("debugInfo")["stoppedThreads"] == [threads["rank 1"]]
        page.ask("continue", threadId=threads["rank 1"])
        assert cell.finish().lines == {0: ["10"], 1: ["20"]}


def test_vs_code_sees_each_rank_as_a_thread(kernel: Kernel) -> None:
    with page_debugger(kernel, "vscode") as page:
        page.break_at(CELL, 3)
        cell = kernel.start(CELL)
        threads = page.stops(2)
        assert names_of(page, threads["rank 1"]) == [("scale", 3), ("<module>", 5)]
        for thread in threads.values():
            page.ask("continue", threadId=thread)
        assert cell.finish().status == "ok"


def test_a_step_goes_from_statement_to_statement_and_ends_with_the_cell(kernel: Kernel) -> None:
    with page_debugger(kernel) as page:
        one = CELL.replace("%%distributed", "%%distributed -r 1")
        page.break_at(one, 3)
        cell = kernel.start(one)
        thread = page.stops(1)["rank 1"]
        for places in (
            [("rank 1: scale", 3), ("rank 1: <module>", 5)],
            [("rank 1: scale", 4), ("rank 1: <module>", 5)],
            [("rank 1: <module>", 6)],
        ):
            if places[0][1] == 6 and names_of(page, thread) == [("rank 1: <module>", 5)]:
                page.ask("next", threadId=thread)  # from Python 3.12 on the call is stopped at once more
                page.event("stopped")
            assert names_of(page, thread) == places
            page.ask("next", threadId=thread)
            if places[0][1] < 6:
                page.event("stopped")
        assert cell.finish().lines == {1: ["20"]}
        kernel.ok("%%distributed\nx = 1\ny = 2")


def test_one_rank_stops_while_another_waits_for_it_and_no_timeout_counts(kernel: Kernel) -> None:
    with page_debugger(kernel) as page:
        page.break_at(ONE, 5)
        cell = kernel.start(ONE)
        threads = page.stops(1)
        assert list(threads) == ["rank 1"]
        frame = page.stack(threads["rank 1"])[0]
        longer = "__import__('time').sleep(1.5)"
        page.ask("evaluate", expression=longer, frameId=frame["id"])
        page.ask("continue", threadId=threads["rank 1"])
        assert cell.finish().lines == {0: ["3.0"], 1: ["3.0"]}


def test_an_interrupt_leaves_the_breakpoint_and_the_next_cell_stops_there_again(kernel: Kernel) -> None:
    with page_debugger(kernel) as page:
        page.break_at(CELL, 4)
        for _ in range(2):
            cell = kernel.start(CELL)
            page.stops(2)
            kernel.interrupt()
            assert cell.finish().ename == "KeyboardInterrupt"
        page.break_at(CELL)
        assert kernel.ok(CELL).lines == {0: ["10"], 1: ["20"]}


def test_switching_the_debugger_off_lets_ranks_go_on_and_on_again_stops_them(kernel: Kernel) -> None:
    with page_debugger(kernel) as page:
        for _ in range(2):
            page.break_at(CELL, 4)
            cell = kernel.start(CELL)
            page.stops(2)
            page.ask("disconnect")
            assert cell.finish().lines == {0: ["10"], 1: ["20"]}
            page.switch_on()


def test_all_ranks_go_on_to_their_next_breakpoint_when_jupyterlab_restarts_its_debugger(kernel: Kernel) -> None:
    with page_debugger(kernel) as page:
        page.break_at(LOOP, 4)
        cell = kernel.start(LOOP)
        for _ in range(5):
            page.stops(2)
            page.ask("disconnect")
            page.switch_on()
            page.break_at(LOOP, 4)
        page.stops(2)
        kernel.interrupt()
        assert cell.finish().ename == "KeyboardInterrupt"


def test_a_rank_that_dies_at_a_breakpoint_is_reported_and_no_longer_stopped(kernel: Kernel) -> None:
    with page_debugger(kernel) as page:
        one = "%%distributed -r 1\nfor turn in range(3):\n    print(turn)"
        page.break_at(one, 3)
        pids = kernel.rank_pids()
        cell = kernel.start(one)
        threads = page.stops(1)
        os.kill(pids[1], signal.SIGKILL)
        assert page.event("continued")["threadId"] == threads["rank 1"]
        assert cell.finish().ename == "RankDied"
        assert page.ask("debugInfo")["stoppedThreads"] == []


def test_a_kernel_whose_debugger_does_not_answer_still_hears_its_page() -> None:
    with Kernel() as kernel:
        kernel.ok("%load_ext nbdist")
        others = adapters()
        page = PageDebugger(kernel)
        page.ask("disconnect")
        (adapter,) = adapters() - others
        os.kill(adapter, signal.SIGSTOP)
        try:
            refusal = page.request("initialize", clientID="jupyterlab", adapterID="python3")
        finally:
            os.kill(adapter, signal.SIGCONT)
        assert not refusal["success"] and "does not answer" in refusal["message"]
        assert not page.ask("debugInfo")["isStarted"]
        page.leave()


def test_cells_of_the_kernel_stop_as_they_did(kernel: Kernel) -> None:
    with page_debugger(kernel) as page:
        page.break_at(LOCAL, 2)
        cell = kernel.start(LOCAL)
        stopped = page.event("stopped")["threadId"]
        assert [frame["line"] for frame in page.stack(stopped)][:1] == [2]
        page.ask("continue", threadId=stopped)
        assert cell.finish().status == "ok"


def test_stopped_ranks_go_on_when_another_notebook_takes_them_and_stop_at_its_breakpoints(kernel: Kernel) -> None:
    with Kernel(NBDIST_PREWARM="0") as other, page_debugger(kernel) as page:
        other.ok("%load_ext nbdist")
        page.break_at(CELL, 4)
        cell = kernel.start(CELL)
        page.stops(2)
        other.ok("%distributed attach --take --wait")
        assert cell.finish().ename == "SessionBroken"
        assert page.ask("debugInfo")["stoppedThreads"] == []
        others = PageDebugger(other)  # which ends with its kernel
        others.break_at(CELL, 4)
        cell = other.start(CELL)
        for thread in others.stops(2).values():
            others.ask("continue", threadId=thread)
        assert cell.finish().lines == {0: ["10"], 1: ["20"]}
        kernel.ok("%distributed attach --take")
        others.close()
