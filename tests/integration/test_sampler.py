"""Looks at the ranks and GPUs of a session, with a driver that a file describes: what arrives in the notebook, and
when nothing does.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from testbed.kernel import Kernel, kernel_with_ranks, wait_until
from testbed.nvml import GIB, as_module, machine
from tests.conftest import shared_kernel
from tests.support.torch_build import cpu_torch

FOR_EVER = 1e6
NO_PROCESS = (1 << 22) + 1  # Linux numbers none higher than 1 << 22
NO_DRIVER_THREADS = "the agent's threads that look to end"
IN_KERNEL = """
import nbdist, time
from nbdist.client.costs.monitor import Monitor

seen, stops = [], []

def watch():
    global monitor
    monitor = Monitor.of(nbdist.get_session())
    monitor.rate = 0.25
    stops.append(monitor.subscribe(seen.append))

def until(reached):
    "The first look from now on of which this is true."
    seen.clear()
    end = time.monotonic() + 20
    while not any(map(reached, seen)):
        assert time.monotonic() < end, seen[-1:]
        time.sleep(0.02)
    return next(filter(reached, seen))

def gpus(sample):
    return [gpu for node in sample.nodes for gpu in node.gpus]

def reasons(sample):
    return "; ".join(node.why for node in sample.nodes)
"""


class Node:
    """A kernel with two ranks, on a machine whose GPUs a file describes."""

    def __init__(self, kernel: Kernel, source: Path) -> None:
        self.kernel = kernel
        self.source = source
        kernel.ok(IN_KERNEL)
        self.agent = agent_of(kernel)
        self._quiet = self.agent.num_threads()

    def set(self, **changes: Any) -> None:
        """What GPU 0 is like from the next look on."""
        state = machine(2)
        state["gpus"][0].update(changes)
        self.write(state)

    def write(self, state: dict[str, Any]) -> None:
        new = self.source.with_suffix(".new")
        new.write_text(json.dumps(state))
        new.replace(self.source)

    def ok(self, *lines: str) -> None:
        self.kernel.ok("\n".join(lines))

    def value(self, expression: str) -> Any:
        return self.kernel.value(expression)

    def rests(self) -> bool:
        """Whether the agent has no more threads than before anybody watched."""
        return self.agent.num_threads() == self._quiet

    def stop_watching(self) -> None:
        self.ok("for stop in stops: stop()", "stops.clear()")


def agent_of(kernel: Kernel) -> psutil.Process:
    children = psutil.Process(kernel.pid).children(recursive=True)
    return next(each for each in children if "nbdist.agent.agent_boot" in " ".join(each.cmdline()))


def driver_in(folder: Path) -> dict[str, Any]:
    """What a kernel needs in its environment so that its processes find the file's driver."""
    return {"PYTHONPATH": os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])}


pytestmark = cpu_torch


@pytest.fixture(scope="module")
def shared_node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    folder = tmp_path_factory.mktemp("driver")
    source = as_module(folder, machine(2))
    with shared_kernel(2, **driver_in(folder)) as kernel:
        yield Node(kernel, source)


@pytest.fixture
def node(shared_node: Node) -> Iterator[Node]:
    """The shared one, in good health; watched by nobody afterwards."""
    shared_node.set()
    yield shared_node
    shared_node.set()
    shared_node.stop_watching()
    wait_until(shared_node.rests, NO_DRIVER_THREADS, limit=20)


@pytest.fixture
def own_node(tmp_path: Path) -> Iterator[Node]:
    source = as_module(tmp_path, machine(2))
    with kernel_with_ranks(2, **driver_in(tmp_path)) as kernel:
        yield Node(kernel, source)


# --- what arrives


def test_what_driver_and_ranks_tell_arrives_in_the_notebook(node: Node) -> None:
    node.ok("watch()", "sample = until(gpus)")
    assert node.value("[(gpu.uuid, gpu.used) for gpu in gpus(sample)]") == [
        ("GPU-00000000", 10 * GIB),
        ("GPU-00000001", 10 * GIB),
    ]
    assert node.value("[(rank.rank, rank.pid, rank.state, rank.why) for rank in sample.ranks]") == [
        (rank, pid, "idle", "") for rank, pid in enumerate(node.kernel.rank_pids())
    ]
    assert node.value("all(rank.private > 0 and rank.node == sample.nodes[0].name for rank in sample.ranks)")


def test_each_rank_names_its_own_node(node: Node) -> None:
    node.ok("%%distributed -r 1\nimport socket\nreal, socket.gethostname = socket.gethostname, lambda: 'elsewhere'")
    node.ok("watch()", "sample = until(gpus)")
    assert node.value("[rank.node == sample.nodes[0].name for rank in sample.ranks]") == [True, False]
    assert node.value("sample.ranks[1].node") == "elsewhere"
    node.ok("%%distributed -r 1\nsocket.gethostname = real")


def test_the_first_look_already_knows_the_machine(node: Node) -> None:
    node.ok("watch()", "until(lambda sample: True)")
    assert node.value("len(gpus(seen[0]))") == 2


def test_it_is_looked_at_while_a_cell_runs(node: Node, tmp_path: Path) -> None:
    gate = tmp_path / "open"
    node.ok(
        "from pathlib import Path",
        f"def open_gate(sample):\n    if sample.ranks[0].state == 'busy': Path({str(gate)!r}).touch()",
        "watch()",
        "stops.append(monitor.subscribe(open_gate))",
    )
    node.ok(f"%%distributed\nimport os, time\nwhile not os.path.exists({str(gate)!r}): time.sleep(0.01)")
    number = node.value("max(sample.cell for sample in seen)")
    assert node.value(f"seen[[sample.cell for sample in seen].index({number})].ranks[1].doing.startswith('cell ')")


def test_another_rate_reaches_the_node(node: Node) -> None:
    node.ok(
        "watch()",
        "until(gpus)",
        "monitor.rate = 0.5",
        "until(lambda sample: sample.nodes and sample.nodes[0].period == 0.5)",
    )


def test_a_gpu_that_vanishes_says_so_and_the_other_goes_on(node: Node) -> None:
    node.ok("watch()", "until(gpus)")
    node.set(handle="GPU_IS_LOST")
    node.ok("lost, other = gpus(until(lambda sample: gpus(sample) and gpus(sample)[0].why))")
    assert "fallen off the bus" in node.value("lost.why")
    assert node.value("(lost.used, other.used)") == (None, 10 * GIB)


def test_a_driver_that_goes_away_leaves_a_reason(node: Node) -> None:
    node.write({"init": "LIB_RM_VERSION_MISMATCH", "gpus": []})
    node.ok("watch()", "sample = until(reasons)")
    assert "a reboot is needed" in node.value("reasons(sample)")
    assert node.value("sample.nodes[0].memory_used > 0")


def test_in_a_container_where_processes_have_the_hosts_numbers_memory_is_nobodys(node: Node) -> None:
    of_a_rank, of_nobody = node.kernel.rank_pids()[0], NO_PROCESS
    node.set(processes={str(of_a_rank): 3 * GIB, str(of_nobody): GIB})
    node.ok("watch()", "sample = until(gpus)")
    assert node.value("(gpus(sample)[0].used, gpus(sample)[0].by_pid)") == (10 * GIB, {})


def test_a_rank_whose_python_can_not_answer_says_so_and_the_other_is_seen(node: Node) -> None:
    node.ok("watch()", "until(gpus)")
    node.ok(
        "code = 'import ctypes; ctypes.PyDLL(None).usleep(2_000_000)'",
        "background = nbdist.get_session().run_in_background(code, [0])",
        "sample = until(lambda sample: sample.ranks[0].why)",
        "background.wait()",
    )
    assert node.value("sample.ranks[0].why") == "it has not answered: it is in a call that blocks Python"
    assert node.value("(sample.ranks[0].state, sample.ranks[0].private)") == ("busy", None)
    assert node.value("(sample.ranks[1].why, sample.ranks[1].private > 0)") == ("", True)


def test_a_machine_that_reports_no_more_has_no_figures_that_move(own_node: Node) -> None:
    own_node.ok("from nbdist.base import limits", "limits.MACHINE_LATE = 0.5", "watch()", "until(gpus)")
    own_node.agent.suspend()
    try:
        own_node.ok("sample = until(lambda sample: sample.nodes[0].silent)")
    finally:
        own_node.agent.resume()
    assert own_node.value("(sample.nodes[0].cpu, sample.nodes[0].memory_used)") == (None, None)
    assert (
        own_node.value("[(gpu.total, gpu.used, gpu.utilization) for gpu in gpus(sample)]")
        == [(80 * GIB, None, None)] * 2
    )
    assert "this machine has not reported for" in own_node.value("gpus(sample)[0].why")
    own_node.ok("until(lambda sample: gpus(sample)[0].used)")


# --- a driver that takes its time


def test_a_driver_that_takes_50_ms_for_each_answer_is_asked_less_often(node: Node) -> None:
    node.set(seconds=0.05)
    node.ok("watch()", "until(lambda sample: sample.nodes and sample.nodes[0].period >= 1.0)")
    assert node.value("len(gpus(seen[-1]))") == 2


def test_a_driver_that_never_answers_delays_neither_output_nor_interrupts(node: Node) -> None:
    node.set(seconds=FOR_EVER)
    node.ok("watch()", "sample = until(reasons)")
    assert "the NVIDIA driver has not answered for" in node.value("reasons(sample)")
    assert node.value("sample.nodes[0].memory_used > 0")
    cell = node.kernel.start("%%distributed\nimport time\nprint('there')\ntime.sleep(600)")
    cell.wait_for("there")
    node.kernel.interrupt()
    assert cell.finish(limit=20).ename == "KeyboardInterrupt"


# --- when nothing runs

LATE_LOOKS = """
from nbdist.client.ranks import observers
late = []
class Late(observers.Observer):
    def node_looked_at(self, traffic, look):
        late.append(look)
observers.subscribe(Late())
"""


def test_while_nobody_watches_the_agent_has_no_thread_for_it_and_sends_nothing(node: Node) -> None:
    node.ok("watch()", "until(gpus)")
    assert not node.rests()
    node.stop_watching()
    wait_until(node.rests, NO_DRIVER_THREADS)
    node.ok(LATE_LOOKS, "%distributed status")
    assert node.value("late") == []
    assert (
        node.value("[thread.name for thread in __import__('threading').enumerate() if 'monitor' in thread.name]") == []
    )


def test_while_it_is_paused_the_agent_rests_and_then_goes_on(node: Node) -> None:
    node.ok("watch()", "until(gpus)", "monitor.paused = True")
    wait_until(node.rests, NO_DRIVER_THREADS)
    node.ok("monitor.paused = False", "until(gpus)")


def test_one_of_two_watchers_leaves_and_the_other_still_sees(node: Node) -> None:
    node.ok("watch()", "watch()", "until(gpus)", "stops.pop()()", "seen.clear()", "until(gpus)")


# --- lives and ends


def test_a_rank_that_dies_is_shown_with_how(own_node: Node) -> None:
    own_node.ok("watch()", "until(gpus)")
    os.kill(own_node.kernel.rank_pids()[1], signal.SIGKILL)
    own_node.ok("sample = until(lambda sample: sample.ranks[1].state == 'dead')")
    assert "SIGKILL" in own_node.value("sample.ranks[1].doing")
    assert own_node.value("sample.ranks[0].private > 0")


def test_ranks_that_are_restarted_after_their_agent_died_are_seen_again(own_node: Node) -> None:
    own_node.ok("watch()", "until(gpus)")
    own_node.agent.kill()
    own_node.ok(
        "import time",
        "while not nbdist.client.session.current.current_session().broken: time.sleep(0.02)",
        "%distributed restart",
        "until(gpus)",
    )


def test_the_next_session_is_seen_although_the_last_ones_watcher_leaves_late(own_node: Node) -> None:
    own_node.ok("watch()", "until(gpus)", "old = stops.pop()", "%distributed stop")
    wait_until(own_node.rests, NO_DRIVER_THREADS)
    own_node.ok("%distributed start -n 1", "watch()", "until(gpus)", "old()", "until(gpus)")
    assert agent_of(own_node.kernel) == own_node.agent


def test_a_kernel_that_is_killed_leaves_an_agent_that_looks_no_more(own_node: Node) -> None:
    own_node.ok("%distributed stop", "session = nbdist.Session(1, linger=600)", "watch()", "until(gpus)")
    controller = own_node.agent.parent()
    assert controller is not None and not own_node.rests()
    os.kill(own_node.kernel.pid, signal.SIGKILL)
    wait_until(own_node.rests, NO_DRIVER_THREADS)
    assert own_node.agent.is_running()
    controller.kill()


def test_a_program_that_ends_while_it_watches_ends_in_silence(tmp_path: Path) -> None:
    program = (
        "import nbdist, threading\nfrom nbdist.client.costs.monitor import Monitor\n"
        "session, there = nbdist.Session(1), threading.Event()\nmonitor = Monitor.of(session)\nmonitor.rate = 0.25\n"
        "monitor.subscribe(lambda sample: there.set())\nassert there.wait(20)\n"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert ended.stdout + ended.stderr == ""
