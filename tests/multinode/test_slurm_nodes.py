"""Nodes that nbdist asks Slurm for. The cluster is real: its daemons run on this machine."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from testbed.kernel import Kernel
from tests.conftest import sharing
from tests.multinode.nodes import kill_node, lines_of, without_nodes
from tests.multinode.slurm_cluster import SlurmCluster, slurm_cluster
from tests.multinode.ssh_server import ROOT

SUM = """
import os, torch, torch.distributed as dist
total = torch.ones(1)
dist.all_reduce(total)
print(rank, int(total), os.environ.get('SLURMD_NODENAME'))
"""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    with slurm_cluster(tmp_path_factory.mktemp("slurm")) as found, ExitStack() as shared:
        for daemon in found.daemons:
            shared.enter_context(sharing(daemon))
        yield found


@pytest.fixture(scope="module")
def kernel(cluster: SlurmCluster) -> Iterator[Kernel]:
    """A notebook outside of any job."""
    with Kernel(**cluster.environment, PYTHONPATH=str(ROOT)) as found, sharing(found):
        found.ok("%load_ext nbdist")
        yield found


def test_a_job_is_asked_for_and_ends_with_the_session(kernel: Kernel, cluster: SlurmCluster) -> None:
    said = kernel.ok("%distributed start --slurm --num-nodes 2 --partition main --time 5 -n 1").stdout
    assert "2 ranks on 2 nodes ready" in said, said
    (job,) = cluster.jobs()
    assert job.startswith("nbdist-")
    said = without_nodes(kernel.run(f"%%distributed\n{SUM}").stdout)
    assert "[0] 0 2 slurm-" in said and "[1] 1 2 slurm-" in said, said
    kernel.ok("%distributed stop")
    assert cluster.await_no_jobs()


def test_a_lost_node_is_replaced_by_one_of_another_job_and_all_jobs_end(kernel: Kernel, cluster: SlurmCluster) -> None:
    kernel.ok("%distributed start --slurm --num-nodes 2 --partition main --time 5 -n 1")
    kernel.ok("%%distributed\nkept = rank + 10")
    kill_node(kernel, 1)
    said = kernel.ok("%distributed heal").stdout
    assert "waiting for Slurm to start a node to replace" in said and "rank 1 replaced in" in said, said
    assert lines_of(kernel, "print(globals().get('kept'))") == {0: ["10"], 1: ["None"]}
    assert {rank: line[:3] for rank, (line,) in lines_of(kernel, SUM).items()} == {0: "0 2", 1: "1 2"}
    kernel.ok("%distributed stop")
    assert cluster.await_no_jobs()


def test_the_queue_is_shown_and_an_interrupt_cancels_the_request(kernel: Kernel, cluster: SlurmCluster) -> None:
    cell = kernel.start("%distributed start --slurm --num-nodes 2 --partition closed -n 1")
    cell.wait_for("is pending (PartitionDown), number 1 of 1 in partition closed")
    assert len(cluster.jobs()) == 1
    kernel.interrupt()
    assert cell.finish().ename == "KeyboardInterrupt"
    assert cluster.await_no_jobs()


def test_an_allocation_that_does_not_come_in_time_is_given_up(kernel: Kernel, cluster: SlurmCluster) -> None:
    on = "{'engine': 'slurm', 'nodes': 2, 'partition': 'closed', 'wait': 1}"
    outcome = kernel.fails(f"import nbdist\nnbdist.Session(1, on={on})", "SessionBroken")
    assert "Slurm did not provide the nodes within 1 s (job" in outcome.evalue, str(outcome)
    assert cluster.await_no_jobs()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("--account", "expected one argument"),
        ("", "give the number of nodes to ask Slurm for"),
        ("--num-nodes 2 --partition nope", "partition 'nope' of Slurm has no nodes"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_starts(kernel: Kernel, arguments: str, words: str) -> None:
    assert words in kernel.fails(f"%distributed start --slurm -n 1 {arguments}", "UsageError").evalue


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("--constraint nothing", "Invalid feature specification"),
        ("--python /no/python", "/no/python: No such file"),
    ],
)
def test_what_slurm_refuses_is_said_in_its_words(
    kernel: Kernel, cluster: SlurmCluster, arguments: str, words: str
) -> None:
    outcome = kernel.fails(f"%distributed start --slurm --num-nodes 2 {arguments} -n 1", "SessionBroken")
    assert words in outcome.evalue, str(outcome)
    assert cluster.await_no_jobs()


def test_inside_a_job_its_nodes_are_used(cluster: SlurmCluster) -> None:
    command = ["salloc", "--nodes=2", "--nodelist=slurm-a,slurm-b", "--quiet"]
    with Kernel(command, **cluster.environment, PYTHONPATH=str(ROOT)) as kernel:
        kernel.ok("%load_ext nbdist")
        assert "leave out --time" in kernel.fails("%distributed start --slurm --time 5 -n 1", "UsageError").evalue
        assert "2 ranks on 2 nodes ready" in kernel.ok("%distributed start --slurm -n 1").stdout
        said = without_nodes(kernel.run(f"%%distributed\n{SUM}").stdout)
        assert "[0] 0 2 slurm-a" in said and "[1] 1 2 slurm-b" in said, said
        kernel.ok("%distributed stop")
    assert cluster.await_no_jobs()


def test_on_a_node_of_the_job_the_notebook_has_ranks_too(cluster: SlurmCluster) -> None:
    allocation = ["salloc", "--nodes=2", "--nodelist=slurm-a,slurm-b", "--quiet"]
    command = [*allocation, "srun", "--nodes=1", "--ntasks=1", "--nodelist=slurm-a"]
    with Kernel(command, **cluster.environment, PYTHONPATH=str(ROOT)) as kernel:
        kernel.ok("%load_ext nbdist")
        assert "2 ranks on 2 nodes ready" in kernel.ok("%distributed start --slurm -n 1").stdout
        said = without_nodes(kernel.run(f"%%distributed\n{SUM}").stdout)
        assert "[0] 0 2 slurm-a" in said and "[1] 1 2 slurm-b" in said, said
        kernel.ok("%distributed stop")
    assert cluster.await_no_jobs()


def test_slurms_warning_and_its_end_of_the_job_are_said_first_and_the_session_is_saved(
    cluster: SlurmCluster, tmp_path: Path
) -> None:
    allocation = ["salloc", "--nodes=2", "--nodelist=slurm-a,slurm-b", "--time=60", "--signal=USR1@150", "--quiet"]
    with Kernel(allocation, **cluster.environment, PYTHONPATH=str(ROOT)) as kernel:
        kernel.ok("%load_ext nbdist")
        flags = f"--slurm -n 1 --end-grace 60 --save {tmp_path}"
        assert "2 ranks on 2 nodes ready" in kernel.ok(f"%distributed start {flags}").stdout
        cell = kernel.start("%%distributed\nkept = rank")
        cell.finish()
        [job] = cluster.ask("squeue", "--noheader", "--format=%i").split()
        cluster.ask("scontrol", "update", f"JobId={job}", "TimeLimit=3")  # now the signal is due, and only now
        cell.wait_late("SIGUSR1 has reached", 120)  # Slurm looks at the clock every half minute
        cluster.ask("scontrol", "update", f"JobId={job}", "TimeLimit=60")
        assert ": the allocation ends soon" in cell.outcome.stderr, str(cell.outcome)
        cell.wait_late("starts a session from it")
        assert lines_of(kernel, "print(kept)") == {0: ["0"], 1: ["1"]}
        cell = kernel.start("%%distributed\npass")
        cell.finish()
        cluster.ask("scancel", "--signal=TERM", job)
        cell.wait_late("starts a session from it")
        assert lines_of(kernel, "print(kept)") == {0: ["0"], 1: ["1"]}
        kernel.ok("%distributed stop")
    assert cluster.await_no_jobs()
