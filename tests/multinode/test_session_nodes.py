"""A session over several machines: one notebook, whose other nodes have joined by `nbdist join`."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import psutil
import pytest
import zmq

from nbdist.wire.processes.nodes import Token
from testbed.kernel import Kernel, Outcome, wait_until
from tests.conftest import sharing
from tests.multinode.hosts import Host, two_hosts
from tests.multinode.nodes import SUM, Node, invitations, joined, lines_of, start, two_nodes


def run(kernel: Kernel, code: str, line: str = "") -> Outcome:
    return kernel.run(f"%%distributed {line}\n{code}")


# --- on one machine


@pytest.fixture(scope="module")
def kernel() -> Iterator[Kernel]:
    """A notebook without a session."""
    with Kernel() as found, sharing(found):
        found.ok("%load_ext nbdist")
        yield found


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kernel]:
    """A notebook with a session of two ranks on each of two nodes; if there is no py-spy, the second has a stand-in."""
    stand_in = tmp_path_factory.mktemp("programs") / "py-spy"
    stand_in.write_text("#!/bin/sh\necho 'Thread 1 (idle): \"MainThread\"\n    sleep (libc.so.6)'\n")
    stand_in.chmod(0o755)
    programs = f"{os.environ['PATH']}:{stand_in.parent}"
    with Kernel() as found, sharing(found):
        found.ok("%load_ext nbdist\nimport os, torch\nos.environ['SET_HERE'] = 'yes'")
        with two_nodes(found, PATH=programs) as node, sharing(node):
            yield found


def test_ranks_are_numbered_node_by_node_and_are_one_group(session: Kernel) -> None:
    found = lines_of(session, SUM + "import os\nprint(rank, local_rank, world_size, os.environ['GROUP_RANK'])")
    places = enumerate([(0, 0), (1, 0), (0, 1), (1, 1)])
    assert found == {rank: ["10", f"{rank} {local} 4 {node}"] for rank, (local, node) in places}


def test_other_nodes_have_their_own_environment_and_what_the_notebook_has_set(session: Kernel) -> None:
    found = run(session, "import os\nprint(os.environ.get('SET_HERE'), os.environ.get('ONLY_THERE'))").lines
    here, there = [f"({os.uname().nodename}) yes None"], [f"({os.uname().nodename}#1) yes yes"]
    assert found == {0: here, 1: here, 2: there, 3: there}


def test_sets_of_strings_have_one_order_on_all_nodes(session: Kernel) -> None:
    found = lines_of(
        session, "import os\nprint(list({'query', 'key', 'value', 'output'}), 'PYTHONHASHSEED' in os.environ)"
    )
    assert len({tuple(lines) for lines in found.values()}) == 1 and "False" in found[0][0], found


def test_a_failure_on_another_node_is_shown_and_sums_are_right_after_it(session: Kernel) -> None:
    outcome = run(session, "import torch.distributed as dist\nif rank == 3: raise ValueError('boom')\ndist.barrier()")
    assert outcome.evalue == f"rank 3 ({os.uname().nodename}#1) raised ValueError: boom", str(outcome)
    assert lines_of(session, SUM) == {rank: ["10"] for rank in range(4)}


def test_an_interrupt_reaches_all_nodes(session: Kernel) -> None:
    cell = session.start("%%distributed\nimport time\nkept = rank\nprint('at it')\ntime.sleep(100)")
    cell.wait_for_ranks(4, "at it")
    session.interrupt()
    assert cell.finish().ename == "KeyboardInterrupt"
    assert "[3] 3" in run(session, "print(kept)").stdout


@pytest.mark.parametrize("size", [10, 3 << 20])
def test_values_go_to_and_come_from_other_nodes(session: Kernel, size: int) -> None:
    session.ok(f"values = torch.arange({size})\n%distributed push values")
    run(session, "doubled = values * 2 + rank")
    session.ok("%distributed pull doubled")
    assert session.value("[torch.equal(found, values * 2 + rank) for rank, found in enumerate(doubled)]") == [True] * 4


def test_status_names_the_nodes(session: Kernel) -> None:
    name = os.uname().nodename
    rows = session.ok("%distributed status").stdout.splitlines()[1:]
    found = [row.split()[1] for row in rows if row.split()[0].isdigit()]
    assert found == [name, name, f"{name}#1", f"{name}#1"], rows


def test_a_cell_runs_on_the_ranks_of_one_node(session: Kernel) -> None:
    node = f"{os.uname().nodename}#1"
    assert run(session, "print('here')", f"-r @{node}").lines == {2: [f"({node}) here"], 3: [f"({node}) here"]}


def test_the_watch_names_the_nodes_of_ranks_that_wait(session: Kernel) -> None:
    cell = session.start(
        "%%distributed\nimport time, torch.distributed as dist\nif rank == 0: time.sleep(1000)\ndist.barrier()"
    )
    name = os.uname().nodename
    cell.wait_until(lambda seen: any(f"rank 0 ({name}) is at" in text for text in seen.plain), "a live line")
    session.interrupt()
    assert cell.finish().ename == "KeyboardInterrupt"


@pytest.mark.parametrize("options", ["", "--native"])
def test_stacks_of_other_nodes_are_shown(session: Kernel, options: str) -> None:
    session.ok(
        "handle = __import__('nbdist').get_session().run_in_background(\n"
        "    'import time\\ntime.sleep(1000)', ranks=[2, 3], show=False)"
    )
    wait_until(lambda: "time.sleep" in session.ok("%distributed stacks").stdout, "ranks to sleep")
    shown = session.ok(f"%distributed stacks {options}").stdout
    session.ok("handle.interrupt(now=True)")
    session.run("handle.wait(20)")
    assert f"ranks 2-3 ({os.uname().nodename}#1), cell" in shown, shown
    assert ("sleep" if options else "time.sleep(1000)") in shown, shown


def test_the_debugger_and_the_flight_record_reach_ranks_of_other_nodes(session: Kernel) -> None:
    last = len(session.rank_pids()) - 1
    session.fails(f"%%distributed\nimport torch, torch.distributed as dist\nif rank == {last}: [][rank]", "RankError")
    cell = session.start("%distributed debug", input_allowed=True)
    assert cell.enter("p rank") == f"[rank {last}] ipdb> "
    cell.enter("q")
    assert f"{last}\n" in cell.finish().stdout
    session.ok("%%distributed\ndist.all_reduce(torch.ones(3))")
    assert "all_reduce float32[3]" in session.ok("%distributed flight").stdout


def test_restart_keeps_the_nodes(session: Kernel) -> None:
    outcome = session.ok("%distributed restart")
    assert "NBDIST_TOKEN" not in outcome.stdout and "4 ranks on 2 nodes ready" in outcome.stdout, str(outcome)
    assert lines_of(session, SUM) == {rank: ["10"] for rank in range(4)}


def test_a_plan_chosen_before_the_start_is_followed_on_all_nodes(kernel: Kernel) -> None:
    kernel.ok("%distributed plan hsdp --replicas 4 --precision bf16")  # as many as all nodes have ranks
    with two_nodes(kernel):
        found = lines_of(
            kernel, "import os\nprint(os.environ['NBDIST_PLAN'], os.environ['ACCELERATE_MIXED_PRECISION'])"
        )
        assert len(found) == 4 and all(found[rank] == found[0] for rank in found), found
        outcome = run(kernel, "import nbdist, torch\nmodel = nbdist.prepare(torch.nn.Linear(8, 8))\nprint('ready')")
        assert outcome.status == "ok" and "ready" in outcome.stdout, str(outcome)
    kernel.ok("%distributed plan --reset")


# --- joining


def test_a_token_joins_once(kernel: Kernel) -> None:
    cell = start(kernel, arguments="-n 1")
    address, (token,) = invitations(cell)
    with joined(address, token):
        assert cell.finish().status == "ok"
        with joined(address, token) as second:
            said = second.end()
    assert second.process.returncode == 2
    assert "token is no longer valid" in said, said
    kernel.run("%distributed stop")


def test_a_token_of_another_session_is_named_at_once(kernel: Kernel) -> None:
    cell = start(kernel, arguments="-n 1")
    address, (token,) = invitations(cell)
    (public, _), (_, secret) = zmq.curve_keypair(), zmq.curve_keypair()
    with joined(address, str(Token(public, secret))) as stranger:
        said = stranger.end()
    assert stranger.process.returncode == 2
    assert f"what listens at tcp://{address} is not the session that this token is from" in said, said
    with joined(address, token):
        assert cell.finish().status == "ok"
    kernel.run("%distributed stop")


def test_a_rank_of_another_node_is_replaced_there(kernel: Kernel) -> None:
    with two_nodes(kernel):
        kernel.ok("%%distributed\nkept = rank\nimport os, torch, torch.distributed as dist")
        assert kernel.run("%%distributed -r 3\nos._exit(3)").ename == "RankDied"
        kernel.ok("%distributed heal")
        found = lines_of(kernel, SUM + "print(local_rank, os.environ['GROUP_RANK'])")
        assert found == {0: ["10", "0 0"], 1: ["10", "1 0"], 2: ["10", "0 1"], 3: ["10", "1 1"]}
        assert run(kernel, "print(kept)", "-r 0-2").lines == {0: ["0"], 1: ["1"], 2: ["2"]}


def test_an_interrupt_says_that_a_machine_does_not_answer_and_the_next_one_ends_the_cell(kernel: Kernel) -> None:
    with two_nodes(kernel) as node:
        cell = kernel.start("%%distributed\nprint('at it')\nimport time\nif rank > 1: time.sleep(100)")
        cell.wait_for_ranks(4, "at it")
        there: list[Any] = [node.process, *psutil.Process(node.process.pid).children(recursive=True)]
        for process in there:
            process.send_signal(signal.SIGSTOP)
        try:
            kernel.interrupt()
            cell.wait_for("have not answered so far: they may be in a call that blocks Python, or the network or")
            assert f"ranks 2-3 ({socket.gethostname()}#" in str(cell.outcome)
            assert "the cell then ends without those that do not answer" in str(cell.outcome)
            kernel.interrupt()
            assert "ranks 2-3" in cell.finish(10).evalue
        finally:
            for process in there:
                process.send_signal(signal.SIGCONT)


def test_leaving_is_a_death_with_a_cause_and_the_others_keep_their_variables(kernel: Kernel) -> None:
    with two_nodes(kernel) as node:
        run(kernel, "kept = rank + 10")
        cell = kernel.start("%%distributed\nprint('at it')\nimport time\nif rank > 1: time.sleep(100)")
        cell.wait_for_ranks(4, "at it")
        node.process.send_signal(signal.SIGINT)
        outcome = cell.finish()
        assert outcome.ename == "RankDied" and "is lost: it was stopped on that machine" in str(outcome), str(outcome)
        assert "is lost: it was stopped on that machine" in kernel.ok("%distributed status").stdout
        assert "\nleft the session\n" in node.end()  # packages of torch's may have a last word
        assert "[1] 11" in run(kernel, "print(kept)", "-r 0,1").stdout
        assert "ranks 2-3 removed" in kernel.run("%distributed shrink").stdout
        assert run(kernel, SUM + "print(kept, world_size)").lines == {0: ["3", "10 2"], 1: ["3", "11 2"]}


def test_an_agent_that_dies_is_said_at_once(kernel: Kernel) -> None:
    with two_nodes(kernel) as node:
        cell = kernel.start("%%distributed\nprint('at it')\nimport time\nif rank > 1: time.sleep(100)")
        cell.wait_for_ranks(4, "at it")
        os.kill(node.agent(), signal.SIGKILL)
        outcome = cell.finish(20)
        assert outcome.ename == "RankDied" and "its agent has ended, SIGKILL" in str(outcome), str(outcome)


def test_a_notebook_that_dies_ends_its_nodes(kernel: Kernel) -> None:
    with Kernel() as doomed:
        doomed.ok("%load_ext nbdist")
        cell = start(doomed, arguments="-n 1")
        address, (token,) = invitations(cell)
        with joined(address, token) as node:
            assert cell.finish().status == "ok"
            os.kill(doomed.pid, signal.SIGKILL)
            assert "the session has ended" in node.end()


def test_an_interrupt_ends_the_waiting_for_nodes(kernel: Kernel) -> None:
    cell = start(kernel)
    invitations(cell)
    kernel.interrupt()
    assert cell.finish().ename == "KeyboardInterrupt"
    assert kernel.ok("%distributed start -n 1\n%distributed stop").status == "ok"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("--num-nodes 2 -n 2", "need an address of this one"),
        ("--num-nodes 2 --master-addr 203.0.113.1 -n 2", "is not an address of this machine"),
        ("--num-nodes 2 --master-addr localhost -n 2", "which other machines can't reach"),
        ("--num-nodes 2 --master-addr 0.0.0.0 -n 2", "would listen on every network"),
        ("--num-nodes 2 --master-addr nowhere.invalid -n 2", "is not a known address"),
        ("--num-nodes 2 --master-addr 127.0.0.1 --interface eth77 -n 2", "no network interface 'eth77'"),
        ("--num-nodes 2 --master-addr 203.0.113.1 --private-network -n 2", "is not an address of this machine"),
        ("--private-network -n 2", "private_network is for sessions on several machines"),
        ("--tunnel -n 2", "--tunnel is for machines that nbdist starts: add `--hosts node-a`"),
        ("--num-nodes 2 --master-addr 127.0.0.1 --master-port 70000 -n 2", "must be at most 65535"),
        ("--master-addr 127.0.0.1 -n 2", "add `--num-nodes 2`"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_starts(kernel: Kernel, arguments: str, words: str) -> None:
    assert words in kernel.fails(f"%distributed start {arguments}", "UsageError").evalue


def test_a_port_that_is_taken_is_named(kernel: Kernel) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        outcome = kernel.fails(
            f"%distributed start --num-nodes 2 --master-addr 127.0.0.1 --master-port {port} -n 1", "SessionBroken"
        )
    assert f"port {port} of 127.0.0.1 is taken" in outcome.evalue


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["127.0.0.1:1"], "nothing listens there"),
        (["127.0.0.1"], "is not an address with a port"),
        (["nowhere.invalid:29500"], "is not a known host"),
    ],
)
def test_join_says_what_is_wrong(arguments: list[str], words: str) -> None:
    command = [sys.executable, "-m", "nbdist", "join", *arguments]
    token = "YE-EPV4A5Donbe7cfE7faqeWydwzoFFN8Dqz-v1qtghGim0dVd5ZrUMwOD-7ZzAhsFAyOgmHUphi_okc2vitEw"
    found = subprocess.run(
        command, check=False, env={**os.environ, "NBDIST_TOKEN": token}, capture_output=True, text=True
    )
    assert found.returncode == 2 and words in found.stderr, found.stderr


@pytest.mark.parametrize("token", ["", "nonsense"])
def test_join_wants_a_token(token: str) -> None:
    command = [sys.executable, "-m", "nbdist", "join", "127.0.0.1:1"]
    found = subprocess.run(
        command, check=False, env={**os.environ, "NBDIST_TOKEN": token}, capture_output=True, text=True
    )
    assert found.returncode == 2 and "token" in found.stderr, found.stderr


# --- several hosts


@dataclass
class Hosts:
    """A notebook on the first of two hosts, with a session over both."""

    kernel: Kernel
    hosts: tuple[Host, Host]
    node: Node


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    with two_hosts() as found, ExitStack() as ends:
        kernel = ends.enter_context(Kernel(found[0].command))
        ends.enter_context(sharing(kernel))
        kernel.ok("%load_ext nbdist")
        node = ends.enter_context(two_nodes(kernel, found[0].address, found[1], "--node-timeout 12"))
        ends.enter_context(sharing(node))
        yield Hosts(kernel, found, node)


def test_hosts_with_networks_of_their_own_are_one_group(hosts: Hosts) -> None:
    found = lines_of(hosts.kernel, SUM + "import os\nprint(os.environ['GLOO_SOCKET_IFNAME'])")
    assert found == {rank: ["10", "cable1" if rank < 2 else "cable2"] for rank in range(4)}


def test_everything_listens_on_the_given_network_or_on_loopback_only(hosts: Hosts) -> None:
    for host in hosts.hosts:
        lines = host.run("ss", "--no-header", "--listening", "--tcp", "--numeric").splitlines()
        addresses = {line.split()[3].rpartition(":")[0] for line in lines}
        assert addresses <= {"127.0.0.1", "[::1]", host.address, f"[::ffff:{host.address}]"}, lines


@pytest.mark.slow
def test_a_cable_that_is_out_for_a_while_is_said_and_costs_nothing(hosts: Hosts) -> None:
    run(hosts.kernel, "kept = rank")
    cell = hosts.kernel.start("%%distributed -r 0\nimport time\nprint('at it')\nwhile True: time.sleep(0.1)")
    cell.wait_for("at it")
    with hosts.hosts[1].cut_off():
        cell.wait_for("has not answered for", 30)
    cell.wait_for("answers again", 60)
    hosts.kernel.interrupt()
    cell.finish()
    assert lines_of(hosts.kernel, SUM + "assert kept == rank") == {rank: ["10"] for rank in range(4)}


def test_a_lost_host_leaves_the_others_their_variables(hosts: Hosts) -> None:
    run(hosts.kernel, "kept = rank + 20")
    os.kill(hosts.node.process.pid, signal.SIGKILL)  # its agent ends with it, and nobody is left to say so
    cell = hosts.kernel.start("%%distributed\nimport time\ntime.sleep(100)")
    outcome = cell.finish()
    assert outcome.ename == "RankDied" and "its connection has ended" in str(outcome), str(outcome)
    assert "[1] 21" in run(hosts.kernel, "print(kept)", "-r 0,1").stdout
