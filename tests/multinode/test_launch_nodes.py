"""notebook_launcher on several nodes: each is a notebook of its own, and what happens on one is seen on all."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import pytest

from testbed.kernel import Execution, Kernel, Outcome, lines_by_rank, wait_until
from tests.conftest import sharing
from tests.multinode.hosts import Host, two_hosts

SETUP = """
import os, time
from nbdist import notebook_launcher

def group():
    import torch.distributed as dist
    dist.init_process_group("gloo")
    return dist

def add():
    import torch
    dist = group()
    total = torch.ones(1) * (dist.get_rank() + 1)
    dist.all_reduce(total)
    print(f"{dist.get_rank()} of {dist.get_world_size()}, here {os.environ['LOCAL_RANK']}")
    dist.destroy_process_group()
    return int(os.environ["RANK"]), total.item()

def fail():
    dist = group()
    if dist.get_rank() == 3:
        raise ValueError("boom")
    dist.barrier()

def leave_early():
    if os.environ["RANK"] != "3":
        group()

def fail_once():
    dist = group()
    if dist.get_rank() == 3 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        raise ValueError("boom")
    dist.barrier()
    dist.destroy_process_group()
    return int(os.environ["RANK"]), os.environ["TORCHELASTIC_RESTART_COUNT"]

def die():
    dist = group()
    if dist.get_rank() == 3:
        os._exit(3)
    dist.barrier()

def outlive():
    dist = group()
    print("at it")
    if "DOOMED" in os.environ:
        time.sleep(100)
    dist.barrier()
    dist.destroy_process_group()

def wait():
    print("at it")
    time.sleep(100)
"""
RENDEZVOUS = pytest.mark.parametrize(
    "backend", [pytest.param("static"), pytest.param("c10d", marks=pytest.mark.torch_private)]
)


@pytest.fixture(scope="module")
def shared() -> Iterator[list[Kernel]]:
    with ExitStack() as ends:
        kernels = [ends.enter_context(Kernel()) for _ in range(2)]
        for kernel in kernels:
            ends.enter_context(sharing(kernel))
            kernel.ok(SETUP)
        yield kernels


@pytest.fixture
def nodes(shared: list[Kernel], port: int) -> Iterator[list[Kernel]]:
    """Two notebooks of this machine. Whatever they launch listens nowhere when a test ends."""
    yield shared
    wait_until(lambda: is_free(port), "a port that is free again")


def is_free(port: int) -> bool:
    try:
        socket.create_server(("127.0.0.1", port)).close()
    except OSError:
        return False
    return True


def launch(kernel: Kernel, node: int, port: int, function: str = "add", **options: object) -> Execution:
    """Launch a function on one of two nodes, with two ranks on each; `result` is what it returned there."""
    arguments = {"num_processes": 2, "num_nodes": 2, "node_rank": node, "use_port": port, **options}
    words = ", ".join(f"{name}={value!r}" for name, value in arguments.items())
    return kernel.start(f"result = None\nresult = notebook_launcher({function}, (), {words})")


def launch_all(nodes: list[Kernel], port: int, function: str = "add", **options: object) -> list[Outcome]:
    """Launch a function on all nodes."""
    cells = [launch(kernel, node, port, function, **options) for node, kernel in enumerate(nodes)]
    return [cell.finish() for cell in cells]


def printed(outcome: Outcome) -> dict[int, list[str]]:
    """What each rank printed."""
    return lines_by_rank("".join(line for line in outcome.stdout.splitlines(keepends=True) if line.startswith("[")))


def results(nodes: list[Kernel]) -> list[object]:
    """What came back, whichever node got which ranks."""
    return sorted(kernel.value("result") for kernel in nodes)


# --- together


@RENDEZVOUS
def test_ranks_of_all_nodes_are_one_job(nodes: list[Kernel], port: int, backend: str) -> None:
    outcomes = launch_all(nodes, port, rdzv_backend=backend)
    assert [outcome.status for outcome in outcomes] == ["ok", "ok"], str(outcomes)
    assert results(nodes) == [[(0, 10.0), (1, 10.0)], [(2, 10.0), (3, 10.0)]]


def test_each_notebook_names_ranks_by_their_number_in_the_whole_job(nodes: list[Kernel], port: int) -> None:
    one, two = launch_all(nodes, port)
    assert printed(one) == {0: ["0 of 4, here 0"], 1: ["1 of 4, here 1"]}
    assert printed(two) == {2: ["2 of 4, here 0"], 3: ["3 of 4, here 1"]}
    assert "ranks 2-3 of 4: node 1 of 2" in two.stdout


def test_nodes_may_have_different_numbers_of_ranks(nodes: list[Kernel], port: int) -> None:
    cells = [launch(nodes[0], 0, port, num_processes=1), launch(nodes[1], 1, port, num_processes=2)]
    assert [cell.finish().status for cell in cells] == ["ok", "ok"]
    assert results(nodes) == [[(0, 6.0)], [(1, 6.0), (2, 6.0)]]


def test_a_node_that_comes_first_waits_for_node_0_and_says_so(nodes: list[Kernel], port: int) -> None:
    second = launch(nodes[1], 1, port)
    second.wait_until(lambda outcome: "waiting for node 0" in "".join(outcome.plain), "a word about the waiting")
    first = launch(nodes[0], 0, port)
    assert [cell.finish().status for cell in (first, second)] == ["ok", "ok"]


# --- a failure


@RENDEZVOUS
def test_a_rank_that_raises_is_named_on_all_nodes(nodes: list[Kernel], port: int, backend: str) -> None:
    for outcome in launch_all(nodes, port, "fail", rdzv_backend=backend):
        assert outcome.ename == "LaunchError", str(outcome)
        assert outcome.evalue == "rank 3 raised ValueError: boom"
    assert "rank 3 is on node 1" in "".join(outcome.traceback for outcome in launch_all(nodes, port, "fail"))


def test_a_rank_that_dies_is_named_on_all_nodes(nodes: list[Kernel], port: int) -> None:
    for outcome in launch_all(nodes, port, "die"):
        assert outcome.evalue.startswith("rank 3 died: exit code 3"), str(outcome)


def test_ranks_that_wait_for_one_of_another_node_that_has_returned_are_an_error_on_all(
    nodes: list[Kernel], port: int
) -> None:
    cells = [launch(nodes[0], 0, port, "leave_early", num_processes=3)]
    cells.append(launch(nodes[1], 1, port, "leave_early", num_processes=1))
    for cell in cells:
        outcome = cell.finish()
        assert "StaleGroupError: waits in init_process_group, cell " in outcome.evalue, str(outcome)
        assert "for rank 3, which has returned" in outcome.evalue


def test_the_ranks_behind_a_failure_are_keys_of_the_error_on_all_nodes(nodes: list[Kernel], port: int) -> None:
    launch_all(nodes, port, "fail")
    for kernel, own in zip(nodes, ({0, 1}, {2, 3}), strict=True):
        failures = kernel.value("list(__import__('sys').last_value.failures)")
        assert failures[0] == 3
        assert set(failures) == own | {3}


def test_a_rank_is_numbered_on_its_own_node_where_nodes_have_different_numbers_of_ranks(
    nodes: list[Kernel], port: int
) -> None:
    cells = [launch(nodes[0], 0, port, "fail", num_processes=3), launch(nodes[1], 1, port, "fail", num_processes=1)]
    for cell, kernel in zip(cells, nodes, strict=True):
        assert cell.finish().evalue == "rank 3 raised ValueError: boom"
        failures = "__import__('sys').last_value.failures"
        assert kernel.value(f"{failures}[3].local_rank") == 0
    assert nodes[0].value(f"{failures}[2].local_rank") == 2


@RENDEZVOUS
def test_after_a_failure_the_ranks_of_all_nodes_start_again(nodes: list[Kernel], port: int, backend: str) -> None:
    for outcome in launch_all(nodes, port, "fail_once", rdzv_backend=backend, max_restarts=1):
        assert outcome.status == "ok", str(outcome)
        assert "rank 3 raised ValueError: boom" in outcome.stdout
        assert "all ranks start again (1 of 1)" in outcome.stdout
    assert results(nodes) == [[(0, "1"), (1, "1")], [(2, "1"), (3, "1")]]


def test_interrupting_one_notebook_ends_the_launch_on_all(nodes: list[Kernel], port: int) -> None:
    cells = [launch(kernel, node, port, "wait") for node, kernel in enumerate(nodes)]
    for cell in cells:
        cell.wait_for("at it")
    nodes[1].interrupt()
    assert cells[1].finish().ename == "KeyboardInterrupt"
    outcome = cells[0].finish()
    assert outcome.evalue == "rank 2 raised KeyboardInterrupt: its notebook was interrupted", str(outcome)


def test_the_end_of_the_notebook_where_all_meet_ends_the_launch_on_the_others(nodes: list[Kernel], port: int) -> None:
    with Kernel() as kernel:
        kernel.ok(SETUP)
        cells = [launch(kernel, 0, port, "wait"), launch(nodes[1], 1, port, "wait")]
        for cell in cells:
            cell.wait_for("at it")
        kernel.manager.signal_kernel(9)
        outcome = cells[1].finish()
    assert outcome.ename == "LaunchError"
    assert f"the node at 127.0.0.1:{port}, which hosts the rendezvous, is gone" in outcome.evalue, str(outcome)


@pytest.mark.slow
@RENDEZVOUS
def test_a_new_notebook_can_take_the_place_of_one_that_has_died(nodes: list[Kernel], port: int, backend: str) -> None:
    options = {"rdzv_backend": backend, "max_restarts": 1}
    with Kernel() as kernel:
        kernel.ok(SETUP + "os.environ['DOOMED'] = 'yes'")  # c10d decides which of the two is node 0
        first = launch(nodes[0], 0, port, "outlive", **options)
        first.wait_until(lambda outcome: "waiting for" in "".join(outcome.plain), "a word about the waiting")
        launch(kernel, 1, port, "outlive", **options).wait_for("at it")
        kernel.manager.signal_kernel(9)
    first.wait_for("all ranks start again (1 of 1)")
    second = launch(nodes[1], 1, port, "outlive", **options)
    assert [cell.finish().status for cell in (first, second)] == ["ok", "ok"]


# --- a node that does not come


@RENDEZVOUS
@pytest.mark.parametrize("node", [0, 1])
def test_a_node_that_never_comes_is_an_error_that_says_what_to_check(
    nodes: list[Kernel], port: int, backend: str, node: int
) -> None:
    outcome = launch(nodes[node], node, port, rdzv_backend=backend, rdzv_conf={"timeout": 3}).finish()
    assert outcome.ename == "NodesMissing"
    for text in ("1 of 2 nodes arrived", f"127.0.0.1:{port}", "within 3 s", "num_nodes", "rdzv_id", "firewall"):
        assert text in outcome.evalue, str(outcome)


@RENDEZVOUS
@pytest.mark.parametrize("node", [0, 1])
def test_waiting_for_a_node_can_be_interrupted(nodes: list[Kernel], port: int, backend: str, node: int) -> None:
    cell = launch(nodes[node], node, port, rdzv_backend=backend)
    cell.wait_until(lambda outcome: "waiting for" in "".join(outcome.plain), "a word about the waiting")
    nodes[node].interrupt()
    assert cell.finish().ename == "KeyboardInterrupt"
    assert is_free(port)


@pytest.mark.parametrize("options", [{"num_nodes": 3}, {"rdzv_id": "other"}, {"max_restarts": 1}])
def test_nodes_that_launch_different_things_are_told(nodes: list[Kernel], port: int, options: dict[str, Any]) -> None:
    waiting = launch(nodes[0], 0, port, rdzv_conf={"timeout": 60})
    outcome = launch(nodes[1], 1, port, **options).finish()
    nodes[0].interrupt()
    waiting.finish()
    assert outcome.ename == "UsageError"
    assert f"{next(iter(options))} is " in outcome.evalue
    assert "the same on all nodes" in outcome.evalue


def test_two_nodes_with_the_same_number_are_told(nodes: list[Kernel], port: int) -> None:
    outcomes = [launch(kernel, node, port, num_nodes=3) for kernel, node in zip(nodes, (0, 1), strict=True)]
    with Kernel() as third:
        third.ok(SETUP)
        outcomes[0].wait_until(lambda outcome: "waiting for 1 of 3" in "".join(outcome.plain), "two nodes")
        outcome = launch(third, 1, port, num_nodes=3).finish()
    nodes[0].interrupt()
    nodes[1].interrupt()
    for cell in outcomes:
        cell.finish()
    assert "another node has joined with node_rank=1" in outcome.evalue, str(outcome)


def test_a_port_that_is_taken_on_node_0_is_named_with_its_owner(nodes: list[Kernel], port: int) -> None:
    nodes[1].ok(f"import socket; listener = socket.create_server(('127.0.0.1', {port}))")
    outcome = launch(nodes[0], 0, port).finish()
    nodes[1].ok("listener.close()")
    assert outcome.ename == "UsageError"
    assert f"port {port} is taken by process {nodes[1].pid}" in outcome.evalue, str(outcome)


@pytest.mark.torch_private
def test_another_program_where_node_0_is_sought_is_named(nodes: list[Kernel], port: int) -> None:
    nodes[0].ok(f"import socket; listener = socket.create_server(('127.0.0.1', {port}))")
    outcome = launch(nodes[1], 1, port).finish()
    nodes[0].ok("listener.close()")
    assert outcome.ename == "UsageError"
    assert f"is not an nbdist launch, but opened by process {nodes[0].pid}" in outcome.evalue, str(outcome)


# --- on hosts of their own


@dataclass
class Hosts:
    """Two notebooks on hosts of their own, and where they are."""

    kernels: list[Kernel]
    hosts: tuple[Host, Host]

    def launch_all(self, function: str = "add", **options: object) -> list[Outcome]:
        return launch_all(self.kernels, 29500, function, master_addr=self.hosts[0].address, **options)


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    with two_hosts() as found, ExitStack() as ends:
        kernels = [ends.enter_context(Kernel(host.command)) for host in found]
        for kernel in kernels:
            ends.enter_context(sharing(kernel))
            kernel.ok(SETUP)
        yield Hosts(kernels, found)


@RENDEZVOUS
def test_hosts_with_addresses_of_their_own_are_one_job(hosts: Hosts, backend: str) -> None:
    outcomes = hosts.launch_all(rdzv_backend=backend)
    assert [outcome.status for outcome in outcomes] == ["ok", "ok"], str(outcomes)
    assert results(hosts.kernels) == [[(0, 10.0), (1, 10.0)], [(2, 10.0), (3, 10.0)]]


def test_a_failure_on_one_host_is_seen_on_the_other(hosts: Hosts) -> None:
    for outcome in hosts.launch_all("fail"):
        assert outcome.evalue == "rank 3 raised ValueError: boom", str(outcome)


def test_a_network_that_fails_is_said_where_all_meet_and_ends_the_launch_elsewhere(hosts: Hosts) -> None:
    """Nothing closes a connection then: whoever waits for an answer would do so for a quarter of an hour."""
    options = {"master_addr": hosts.hosts[0].address, "rdzv_conf": {"read_timeout": 5}}
    cells = [launch(kernel, node, 29500, "wait", **options) for node, kernel in enumerate(hosts.kernels)]
    for cell in cells:
        cell.wait_for("at it")
    with hosts.hosts[1].cut_off():
        outcome = cells[1].finish()
        assert outcome.ename == "LaunchError"
        assert "which hosts the rendezvous, is gone" in outcome.evalue and "network" in outcome.evalue, str(outcome)
        cells[0].wait_for("node 1 has not been heard from for 10 s")
    hosts.kernels[0].interrupt()
    assert cells[0].finish().ename == "KeyboardInterrupt"


def test_the_port_is_open_at_the_given_address_only(hosts: Hosts) -> None:
    address = hosts.hosts[0].address
    cell = launch(hosts.kernels[0], 0, 29500, master_addr=address)
    cell.wait_until(lambda outcome: "waiting for 1 of 2" in "".join(outcome.plain), "a word about the waiting")
    listeners = hosts.hosts[0].run("ss", "--no-header", "--listening", "--tcp", "--numeric", "sport = :29500")
    hosts.kernels[0].interrupt()
    cell.finish()
    assert [line.split()[3] for line in listeners.splitlines()] == [f"{address}:29500"]
