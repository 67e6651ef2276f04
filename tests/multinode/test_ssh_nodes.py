"""Nodes that nbdist starts itself by ssh, and profiles of them. The server is real, and listens on loopback."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from testbed.kernel import Kernel
from tests.conftest import sharing
from tests.multinode.nodes import SUM, lines_of, without_nodes
from tests.multinode.ssh_server import SshServer, ssh_server

RANKS = "import os\nprint(rank, local_rank, world_size, os.environ['GROUP_RANK'], os.environ.get('ONLY_THERE'))"
PROFILES = """
[pair]
engine = "ssh"
hosts = ["localhost:0", "node-a:1", "node-b:2"]
ssh_config = "{config}"
[wrong]
engine = "ssh"
hosts = ["node-a"]
prot = 22
[strange]
engine = "teleport"
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SshServer]:
    with ssh_server(tmp_path_factory.mktemp("ssh")) as found, sharing(found):
        yield found


@pytest.fixture(scope="module")
def kernel(server: SshServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kernel]:
    """A notebook without a session, whose user has profiles."""
    home = tmp_path_factory.mktemp("config")
    (home / "nbdist").mkdir()
    (home / "nbdist" / "clusters.toml").write_text(PROFILES.format(config=server.config))
    with Kernel(XDG_CONFIG_HOME=str(home)) as found, sharing(found):
        found.ok("%load_ext nbdist")
        yield found


def start(kernel: Kernel, server: SshServer, arguments: str) -> str:
    return kernel.ok(f"%distributed start --ssh-config {server.config} {arguments}").stdout


def wait_for_end(pids: list[int]) -> list[int]:
    """Those that have not ended in time."""
    living = [psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)]
    return [process.pid for process in psutil.wait_procs(living, timeout=20)[1]]


def test_hosts_are_started_with_their_numbers_of_ranks_and_ended(kernel: Kernel, server: SshServer) -> None:
    assert "4 ranks on 3 nodes ready" in start(kernel, server, "--hosts node-a,node-b:2 -n 1")
    nodes = server.nodes()
    said = without_nodes(kernel.run(f"%%distributed\n{RANKS}").stdout)
    for line in ("[0] 0 0 4 0 None", "[1] 1 0 4 1 yes", "[2] 2 0 4 2 yes", "[3] 3 1 4 2 yes"):
        assert line in said, said
    assert "4 ranks on 3 nodes ready" in kernel.ok("%distributed restart").stdout
    assert server.nodes() == nodes and len(nodes) == 2
    kernel.ok("%distributed stop")
    assert wait_for_end(nodes) == []


def test_through_a_tunnel_a_node_connects_to_its_own_machine_only(kernel: Kernel, server: SshServer) -> None:
    said = start(kernel, server, "--hosts node-a -n 1 --tunnel")
    assert "2 ranks on 2 nodes ready" in said and "still use the network of" in said, said
    (node,) = server.nodes()
    (agent,) = psutil.Process(node).children()
    ends = {end.raddr[:] for end in agent.net_connections("tcp") if end.raddr and end.status == psutil.CONN_ESTABLISHED}
    ways = {(host, port) for host, port in ends if host == "127.0.0.1" and 20_000 <= port < 30_000}
    assert len(ways) == 1, ends
    assert lines_of(kernel, SUM) == {0: ["3"], 1: ["3"]}
    kernel.ok("%distributed stop")
    assert wait_for_end([node]) == []


def test_more_nodes_than_there_are_hosts_can_not_be_had(kernel: Kernel, server: SshServer) -> None:
    assert "2 ranks on 2 nodes ready" in start(kernel, server, "--hosts node-a -n 1")
    refused = kernel.fails("%distributed grow --num-nodes 1", "SessionBroken").evalue
    assert "no rank was added: --hosts of this session names 1 other host, and no host is left unused" in refused, (
        refused
    )
    assert "ranks 1, 3 added" in kernel.ok("%distributed grow").stdout
    kernel.ok("%distributed stop")


def test_a_profile_is_started_by_its_name_and_this_machine_may_have_no_ranks(kernel: Kernel) -> None:
    assert "3 ranks on 2 nodes ready" in kernel.ok("%distributed start --on pair").stdout
    found = lines_of(kernel, f"{SUM}\n{RANKS}")
    assert found == {0: ["6", "0 0 3 0 yes"], 1: ["6", "1 0 3 1 yes"], 2: ["6", "2 1 3 1 yes"]}
    assert "3 ranks on 2 nodes ready" in kernel.ok("%distributed restart").stdout
    kernel.ok("%distributed stop")


LAUNCH = """
import os
from nbdist import notebook_launcher
def add(number):
    import torch, torch.distributed as dist
    dist.init_process_group("gloo")
    total = torch.ones(1) * number
    dist.all_reduce(total)
    mine = [os.environ[name] for name in ("RANK", "LOCAL_RANK", "GROUP_RANK", "ACCELERATE_MIXED_PRECISION")]
    return total.item(), *mine, os.environ.get("ONLY_THERE")
def fail():
    if os.environ["RANK"] == "2":
        raise ValueError("boom")
"""
ADDED = [(6.0, "0", "0", "0", "bf16", "yes"), (6.0, "1", "0", "1", "bf16", "yes"), (6.0, "2", "1", "1", "bf16", "yes")]


def test_a_function_is_launched_on_the_nodes_of_a_profile(kernel: Kernel, server: SshServer) -> None:
    kernel.ok(f"{LAUNCH}\nfound = notebook_launcher(add, (2,), mixed_precision='bf16', on='pair')")
    assert kernel.value("found") == ADDED
    assert wait_for_end(server.nodes()) == []


def test_a_launch_that_fails_on_another_node_names_its_rank_and_leaves_nothing(
    kernel: Kernel, server: SshServer
) -> None:
    outcome = kernel.fails(f"{LAUNCH}\nnotebook_launcher(fail, on='pair')", "LaunchError")
    assert outcome.evalue.startswith("rank 2 (") and "raised ValueError: boom" in outcome.evalue, str(outcome)
    local = "import sys\nfailure = sys.last_value.failures[2]\nlocal = failure.local_rank"
    assert kernel.ok(local) and kernel.value("local") == 1
    assert wait_for_end(server.nodes()) == []


def test_a_script_runs_on_the_nodes_of_a_profile(kernel: Kernel, server: SshServer, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import os, torch, torch.distributed as dist\ndist.init_process_group('gloo')\ntotal = torch.ones(1)\n"
        "dist.all_reduce(total)\nprint(total.item(), os.environ['GROUP_RANK'], __name__)"
    )
    said = kernel.ok(f"import sys\n!{{sys.executable}} -m nbdist run {script} --on pair").stdout
    assert "3.0 0 __main__" in said and "3.0 1 __main__" in said and "3 ranks, " in said, said
    assert wait_for_end(server.nodes()) == []


def test_a_function_is_launched_on_a_session_whose_variables_stay(kernel: Kernel) -> None:
    kernel.ok(f"{LAUNCH}\n%distributed start --on pair")
    kernel.run("%%distributed\nkept = rank + 10")
    kernel.ok("import nbdist\nfound = notebook_launcher(add, (3,), on=nbdist.get_session())")
    assert kernel.value("[row[0] for row in found]") == [9.0] * 3
    assert "] (" in kernel.run("%%distributed\nprint(kept)").stdout
    kernel.ok("%distributed stop")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("on='pairs'", "has no profile 'pairs': did you mean 'pair'"),
        ("on='pair', num_nodes=2", "`on` starts the other nodes itself"),
        ("on='pair', max_restarts=1", "`on` starts the other nodes itself"),
        ("on='pair', start_method='fork'", "start_method='fork'"),
    ],
)
def test_a_launch_that_cannot_be_is_refused_before_anything_starts(kernel: Kernel, arguments: str, words: str) -> None:
    outcome = kernel.fails(f"{LAUNCH}\nnotebook_launcher(fail, {arguments})", "UsageError")
    assert words in outcome.evalue, str(outcome)


def test_an_ssh_that_ends_is_a_lost_node_and_the_others_keep_their_variables(kernel: Kernel, server: SshServer) -> None:
    start(kernel, server, "--hosts node-a -n 1")
    nodes = server.nodes()
    kernel.run("%%distributed\nkept = rank + 10")
    cell = kernel.start("%%distributed\nprint('at it')\nimport time\nif rank: time.sleep(100)")
    cell.wait_for_ranks(2, "at it")
    children = psutil.Process(kernel.pid).children(recursive=True)
    (ssh,) = [process for process in children if process.name() == "ssh"]
    ssh.send_signal(signal.SIGKILL)
    outcome = cell.finish()
    assert outcome.ename == "RankDied" and "is lost" in str(outcome), str(outcome)
    assert wait_for_end(nodes) == []
    assert "[0] 10" in without_nodes(kernel.run("%%distributed -r 0\nprint(kept)").stdout)
    assert "2 ranks on 2 nodes ready" in kernel.ok("%distributed restart").stdout  # with a new node in its place
    kernel.ok("%distributed stop")


def test_a_lost_node_is_started_again_in_its_place(kernel: Kernel, server: SshServer) -> None:
    start(kernel, server, "--hosts node-a,node-b -n 1")
    kernel.ok("%%distributed\nkept = rank")
    (of_rank,) = kernel.ok("%%distributed -r 1\nimport os\nprint('pid', os.getpid())").stdout.split("pid ")[1].split()
    before = server.nodes()
    (node,) = {parent.pid for parent in psutil.Process(int(of_rank)).parents()} & set(before)
    cell = kernel.start("%%distributed\nprint('at it')\nimport time\nif rank == 1: time.sleep(100)")
    cell.wait_for_ranks(3, "at it")
    os.kill(node, signal.SIGKILL)
    assert cell.finish().ename == "RankDied"
    said = kernel.ok("%distributed heal").stdout
    assert "waiting for ssh to start a node to replace" in said and "rank 1 replaced in" in said, said
    nodes = server.nodes()
    assert len(nodes) == 2 and set(nodes) & set(before) == set(before) - {node}
    said = without_nodes(kernel.ok("%%distributed -r 0,2\nprint(kept)").stdout)
    assert "[0] 0" in said and "[2] 2" in said, said
    assert lines_of(kernel, SUM) == {0: ["6"], 1: ["6"], 2: ["6"]}
    kernel.ok("%distributed stop")
    assert wait_for_end(nodes) == []


def test_nodes_end_with_a_notebook_that_is_killed(server: SshServer) -> None:
    with Kernel() as doomed:
        doomed.ok("%load_ext nbdist")
        start(doomed, server, "--hosts node-a -n 1")
        nodes = server.nodes()
        os.kill(doomed.pid, signal.SIGKILL)
        assert nodes and wait_for_end(nodes) == []


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("--hosts closed", "ssh to host 'closed' failed: "),
        ("--hosts stranger", "ssh to host 'stranger' failed: "),
        ("--hosts locked", "ssh to host 'locked' failed: "),
        ("--hosts unknown --master-addr 127.0.0.1", "ssh to host 'unknown' failed: "),
        ("--hosts node-a,closed", "ssh to host 'closed' failed: "),
        ("--hosts node-a --python /no/python", "host 'node-a' has no Python at /no/python"),
    ],
)
def test_what_fails_on_a_host_is_one_message_and_nothing_is_left(
    kernel: Kernel, server: SshServer, arguments: str, words: str
) -> None:
    outcome = kernel.fails(f"%distributed start --ssh-config {server.config} {arguments} -n 1", "SessionBroken")
    assert words in outcome.evalue, str(outcome)
    assert wait_for_end(server.nodes()) == []


def test_a_python_without_nbdist_is_named(kernel: Kernel, server: SshServer, tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nunset PYTHONPATH\nexec {sys.executable} -S -I "$@"\n')
    python.chmod(0o755)
    outcome = kernel.fails(
        f"%distributed start --ssh-config {server.config} --hosts node-a --python {python} -n 1", "SessionBroken"
    )
    assert f"{python} of host 'node-a' has no nbdist" in outcome.evalue, str(outcome)


def test_an_interrupt_ends_the_waiting_for_a_host(kernel: Kernel, server: SshServer, tmp_path: Path) -> None:
    mark, python = tmp_path / "began", tmp_path / "python"
    os.mkfifo(mark)
    python.write_text(f"#!/bin/sh\necho began > {mark}\nexec cat\n")  # until its standard input ends
    python.chmod(0o755)
    cell = kernel.start(f"%distributed start --ssh-config {server.config} --hosts node-a --python {python} -n 1")
    assert mark.read_text() == "began\n"
    kernel.interrupt()
    assert cell.finish().ename == "KeyboardInterrupt"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("--on pairs", "has no profile 'pairs': did you mean 'pair'? Available profiles: pair, wrong, strange"),
        ("--on wrong", "has no option 'prot'"),
        ("--on strange", "unknown cluster engine 'teleport'. Available engines: "),
        ("--on pair --partition gpu", "has no option 'partition'"),
        ("--hosts node-a --slurm", "exclude each other"),
        ("--hosts node-a --num-nodes 2", "leave out --num-nodes"),
        ("--hosts node-a,node-a", "host 'node-a' is named twice"),
        ("--hosts node-a:x", "invalid host 'node-a:x'"),
        ("--hosts -oProxyCommand=x", "expected one argument"),
        ("--hosts localhost:2", "names no other machine"),
        ("--gres gpu:8", "--gres is for machines that nbdist starts: add `--slurm`"),
        ("--hosts nowhere.invalid", "add `--master-addr ADDRESS`"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_starts(kernel: Kernel, arguments: str, words: str) -> None:
    assert words in kernel.fails(f"%distributed start {arguments} -n 1", "UsageError").evalue


def test_the_end_of_standard_input_makes_a_node_leave_that_got_its_token_there(kernel: Kernel) -> None:
    cell = kernel.start("%distributed start --num-nodes 2 --master-addr 127.0.0.1 -n 1")
    cell.wait_for("nbdist join")
    token, address = cell.outcome.stdout.split("NBDIST_TOKEN=")[1].split()[0::3][:2]
    node = subprocess.Popen(
        [sys.executable, "-m", "nbdist", "join", address, "--token-file", "-"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert node.stdin is not None
    node.stdin.write(f"{token}\n")
    node.stdin.flush()
    assert cell.finish().status == "ok"
    assert node.communicate(timeout=30)[0].endswith("left the session\n")  # it closes standard input first
    kernel.ok("%distributed stop")
