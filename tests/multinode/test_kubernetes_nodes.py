"""Nodes that nbdist asks Kubernetes for. The API server is a stand-in that validates; its pods are real processes."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator

import pytest

from testbed.kernel import Kernel, wait_until
from tests.conftest import sharing
from tests.multinode.nodes import kill_node, lines_of
from tests.multinode.ssh_server import ROOT

pytest.importorskip("kubernetes", reason="its client is not installed: pip install 'nbdist[kubernetes]'")

from tests.multinode.api_server import ApiServer, api_server

SUM = """
import os, torch, torch.distributed as dist
total = torch.ones(1)
dist.all_reduce(total)
print(rank, int(total), os.environ.get("OF_POD", "").split("-")[-2:-1], "NBDIST_TOKEN" in os.environ)
"""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[ApiServer, str]]:
    """A cluster without GPUs, and where its configuration is."""
    with api_server(tmp_path_factory.mktemp("kubernetes")) as (found, config):
        yield found, str(config)


@pytest.fixture(scope="module")
def kernel(cluster: tuple[ApiServer, str]) -> Iterator[Kernel]:
    """A notebook without a session."""
    with Kernel(KUBECONFIG=cluster[1], PYTHONPATH=str(ROOT)) as found, sharing(found):
        found.ok("%load_ext nbdist")
        yield found


@pytest.fixture
def server(cluster: tuple[ApiServer, str]) -> Iterator[ApiServer]:
    """The API server, which has nothing when a test begins, and when it has ended."""
    found, _ = cluster
    found.asked.clear()
    yield found
    wait_until(lambda: not found.objects and not found.processes(), "the end of Job, Secret and pods")


def start(arguments: str) -> str:
    python = "" if "--python" in arguments else f"--python {sys.executable}"
    image = "" if "--image" in arguments else "--image any"
    return f"%distributed start --kubernetes {python} {image} {arguments} -n 1"


def test_pods_are_nodes_in_their_order_and_are_deleted_with_the_session(kernel: Kernel, server: ApiServer) -> None:
    outcome = kernel.ok(start("--num-nodes 2"))
    assert "2 ranks on 2 nodes ready" in outcome.stdout, str(outcome)
    said = kernel.run(f"%%distributed\n{SUM}").stdout
    assert "0 2 ['0'] False" in said and "1 2 ['1'] False" in said, said
    job, secret = server.asked
    assert job["metadata"]["namespace"] == "research"
    assert secret["metadata"]["ownerReferences"][0]["uid"] == job["metadata"]["uid"]
    tokens = secret["stringData"]["tokens"].split(",")
    assert len(tokens) == 2 and not any(token in str(job) for token in tokens)
    kernel.ok("%distributed stop")


def test_a_lost_pod_is_replaced_by_one_of_another_job_and_both_are_deleted(kernel: Kernel, server: ApiServer) -> None:
    kernel.ok(start("--num-nodes 2"))
    kernel.ok("%%distributed\nkept = rank + 10")
    kill_node(kernel, 1)
    said = kernel.ok("%distributed heal").stdout
    assert "waiting for Kubernetes to start a node to replace" in said and "rank 1 replaced in" in said, said
    assert lines_of(kernel, "print(globals().get('kept'))") == {0: ["10"], 1: ["None"]}
    assert lines_of(kernel, SUM) == {0: ["0 2 ['0'] False"], 1: ["1 2 ['0'] False"]}
    kernel.ok("%distributed stop")


def test_pods_end_with_a_notebook_that_is_killed(cluster: tuple[ApiServer, str], server: ApiServer) -> None:
    with Kernel(KUBECONFIG=cluster[1], PYTHONPATH=str(ROOT)) as doomed:
        doomed.ok("%load_ext nbdist\n" + start("--num-nodes 2"))
        assert len(server.processes()) == 2
        os.kill(doomed.pid, signal.SIGKILL)
        wait_until(lambda: not server.processes(), "the end of the pods")


def test_what_pods_wait_for_is_shown_and_an_interrupt_deletes_them(kernel: Kernel, server: ApiServer) -> None:
    cell = kernel.start(start("--num-nodes 2 --gpus-per-node 8"))
    cell.wait_for("0 of 2 pods of Job nbdist-")
    cell.wait_for("Unschedulable: 0/2 nodes are available: 2 Insufficient nvidia.com/gpu.; Ctrl-C deletes the Job")
    kernel.interrupt()
    assert cell.finish().ename == "KeyboardInterrupt"


def test_pods_that_do_not_run_in_time_are_given_up(kernel: Kernel, server: ApiServer) -> None:
    on = "{'engine': 'kubernetes', 'image': 'any', 'nodes': 2, 'gpus_per_node': 8, 'wait': 1}"
    outcome = kernel.fails(f"import nbdist\nnbdist.Session(1, on={on})", "SessionBroken")
    assert "Kubernetes did not start the pods within 1 s" in outcome.evalue, str(outcome)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("--namespace closed", "Kubernetes refuses the nodes in namespace 'closed': jobs is forbidden"),
        ("--image missing/image", "can't run image 'missing/image': ImagePullBackOff: Back-off pulling image"),
        ("--python /bin/false", "has ended (exit code 1)"),
    ],
)
def test_what_the_cluster_refuses_is_one_message_and_nothing_is_left(
    kernel: Kernel, server: ApiServer, arguments: str, words: str
) -> None:
    outcome = kernel.fails(start(f"--num-nodes 2 {arguments}"), "SessionBroken")
    assert words in outcome.evalue, str(outcome)


def test_a_dry_run_shows_what_would_be_created_and_creates_nothing(kernel: Kernel, server: ApiServer) -> None:
    outcome = kernel.ok(start("--num-nodes 3 --gpus-per-node 2 --volumes data:/data,code:/src --dry-run"))
    for words in ("completions: 3", "nvidia.com/gpu: '2'", "claimName: data", "mountPath: /src", "kind: Secret"):
        assert words in outcome.stdout, str(outcome)
    assert server.asked == []


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("--kubernetes", "give the image that the pods run"),
        ("--kubernetes --image any --volumes data", "invalid volume 'data'"),
        ("--image any", "--image is for machines that nbdist starts: add `--kubernetes`"),
        ("--hosts node-a --dry-run --master-addr 127.0.0.1", "--dry-run shows what --kubernetes would create"),
        ("--dry-run", "--dry-run shows what --kubernetes would create"),
        ("--kubernetes --slurm", "exclude each other"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_starts(kernel: Kernel, arguments: str, words: str) -> None:
    assert words in kernel.fails(f"%distributed start {arguments} -n 1", "UsageError").evalue


def test_without_a_configuration_it_is_said_what_has_to_work(kernel: Kernel) -> None:
    with Kernel(KUBECONFIG="/nowhere", PYTHONPATH=str(ROOT)) as lost:
        outcome = lost.fails("%load_ext nbdist\n" + start("--num-nodes 2"), "UsageError")
    assert "make `kubectl get pods` work in a terminal" in outcome.evalue, str(outcome)
