"""Nodes that nbdist asks Ray for. The cluster is real: two nodes of Ray's own kind for tests, on this machine."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import psutil
import pytest

from testbed.kernel import Kernel, wait_until
from tests.conftest import sharing
from tests.multinode.nodes import kill_node, lines_of
from tests.multinode.ssh_server import ROOT

pytest.importorskip("ray", reason="Ray is not installed: pip install 'nbdist[ray]'")

CLUSTER = """
import sys
from ray.cluster_utils import Cluster
small = {"num_cpus": 2, "object_store_memory": 80 << 20, "include_dashboard": False}
cluster = Cluster(initialize_head=True, head_node_args=small)
cluster.add_node(num_cpus=2, num_gpus=1, object_store_memory=80 << 20)
cluster.wait_for_nodes()
print(cluster.address, flush=True)
sys.stdin.read()
cluster.shutdown()
"""
SUM = """
import os, torch, torch.distributed as dist
total = torch.ones(1)
dist.all_reduce(total)
print(rank, int(total), os.environ.get('RAY_JOB_ID') is not None)
"""


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """The address of a cluster with two nodes of 2 CPUs, one of them with a GPU that only Ray believes in."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "RAY_TMPDIR": "/tmp/ray", "RAY_USAGE_STATS_ENABLED": "0"}
    process = subprocess.Popen(
        [sys.executable, "-c", CLUSTER], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdin is not None and process.stdout is not None
    try:
        found = process.stdout.readline().strip()
        assert found, "Ray did not come up"
        with sharing(process):
            yield found
    finally:
        process.communicate(timeout=60)  # it ends with its standard input


@pytest.fixture(scope="module")
def kernel(address: str) -> Iterator[Kernel]:
    """A notebook without a session."""
    with Kernel(PYTHONPATH=str(ROOT)) as found, sharing(found):
        found.ok("%load_ext nbdist")
        yield found


def nodes() -> list[int]:
    """The processes of `nbdist join` that Ray runs."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if "nbdist.command" in "".join(process.cmdline()[2:3]) and "RAY_JOB_ID" in process.environ():
                found.append(process.pid)
    return found


def test_a_node_on_each_of_rays_and_all_ends_with_the_session(kernel: Kernel, address: str) -> None:
    outcome = kernel.ok(f"%distributed start --ray {address} --num-nodes 2 -n 1")
    assert "2 ranks on 2 nodes ready" in outcome.stdout, str(outcome)
    said = kernel.run(f"%%distributed\n{SUM}").stdout
    assert "0 2 True" in said and "1 2 True" in said, said
    assert len(nodes()) == 2
    kernel.ok("%distributed stop")
    wait_until(lambda: not nodes(), "the end of the nodes")


def test_a_lost_node_is_replaced_by_one_of_another_actor_and_all_actors_end(kernel: Kernel, address: str) -> None:
    kernel.ok(f"%distributed start --ray {address} --num-nodes 2 -n 1")
    kernel.ok("%%distributed\nkept = rank + 10")
    kill_node(kernel, 1)
    said = kernel.ok("%distributed heal").stdout
    assert "waiting for Ray to start a node to replace" in said and "rank 1 replaced in" in said, said
    assert lines_of(kernel, "print(globals().get('kept'))") == {0: ["10"], 1: ["None"]}
    assert lines_of(kernel, SUM) == {0: ["0 2 True"], 1: ["1 2 True"]}
    assert len(nodes()) == 2
    kernel.ok("%distributed stop")
    wait_until(lambda: not nodes(), "the end of the nodes")


def test_ray_starts_another_node_for_a_session_that_grows(kernel: Kernel, address: str) -> None:
    kernel.ok(f"%distributed start --ray {address} --num-nodes 2 -n 1")
    kill_node(kernel, 1)
    kernel.ok("%distributed shrink")
    said = kernel.ok("%distributed grow --num-nodes 1 -n 1").stdout
    assert "waiting for Ray to start 1 more node" in said and "rank 1 added in" in said, said
    assert lines_of(kernel, SUM) == {0: ["0 2 True"], 1: ["1 2 True"]}
    assert len(nodes()) == 2
    kernel.ok("%distributed stop")
    wait_until(lambda: not nodes(), "the end of the nodes")


def test_nodes_end_with_a_notebook_that_is_killed(address: str) -> None:
    with Kernel(PYTHONPATH=str(ROOT)) as doomed:
        doomed.ok(f"%load_ext nbdist\n%distributed start --ray {address} --num-nodes 1 -n 1")
        assert len(nodes()) == 1
        os.kill(doomed.pid, signal.SIGKILL)
        wait_until(lambda: not nodes(), "the end of the nodes")


def test_what_is_in_use_is_waited_for_and_an_interrupt_gives_up(kernel: Kernel, address: str) -> None:
    with Kernel(PYTHONPATH=str(ROOT)) as other:
        other.ok(f"%load_ext nbdist\n%distributed start --ray {address} --num-nodes 1 --gpus-per-node 1 -n 1")
        cell = kernel.start(f"%distributed start --ray {address} --num-nodes 1 --gpus-per-node 1 -n 1")
        cell.wait_for("waiting for Ray: 1 CPU, 1 GPU on each node; Ctrl-C cancels")
        kernel.interrupt()
        assert cell.finish().ename == "KeyboardInterrupt"
        on = f"{{'engine': 'ray', 'address': '{address}', 'nodes': 1, 'gpus_per_node': 1, 'wait': 1}}"
        outcome = kernel.fails(f"import nbdist\nnbdist.Session(1, on={on})", "SessionBroken")
        assert "Ray did not provide the nodes within 1 s" in outcome.evalue, str(outcome)
        other.ok("%distributed stop")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("--num-nodes 3", "the Ray cluster has 2 nodes with 1 CPU, but 3 were requested"),
        ("--num-nodes 2 --gpus-per-node 1", "the Ray cluster has 1 node with 1 CPU, 1 GPU, but 2 were requested"),
        ("--num-nodes 1 --python /no/python", "has no Python at /no/python"),
    ],
)
def test_what_ray_does_not_have_is_one_message_and_nothing_is_left(
    kernel: Kernel, address: str, arguments: str, words: str
) -> None:
    outcome = kernel.fails(f"%distributed start --ray {address} {arguments} -n 1", "SessionBroken")
    assert words in outcome.evalue, str(outcome)
    assert nodes() == []


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("--ray nonsense --num-nodes 2", "'nonsense' is not an address with a port"),
        ("--ray --hosts node-a", "exclude each other"),
        ("--gpus-per-node 2", "--gpus-per-node is for machines that nbdist starts: add `--ray`"),
        ("--ray --num-nodes 2 --partition gpu", "has no option 'partition'"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_starts(kernel: Kernel, arguments: str, words: str) -> None:
    assert words in kernel.fails(f"%distributed start {arguments} -n 1", "UsageError").evalue


def test_a_ray_that_is_not_there_is_said_at_once(kernel: Kernel) -> None:
    outcome = kernel.fails("%distributed start --ray 127.0.0.1:1 --num-nodes 2 -n 1", "SessionBroken")
    assert "Ray at 127.0.0.1:1 can't be reached" in outcome.evalue, str(outcome)
