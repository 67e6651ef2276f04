"""Nodes that join as a job of torchrun, mpirun or srun, which start a process for each rank of theirs."""

from __future__ import annotations

import base64
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import psutil
import pytest

from testbed.kernel import Execution, Kernel
from testbed.ports import free_port
from tests.conftest import sharing
from tests.multinode.slurm_cluster import slurm_cluster

ROOT = Path(__file__).resolve().parents[2]
SUM = """
import os, torch, torch.distributed as dist
total = torch.ones(1)
dist.all_reduce(total)
mine = [name for name in os.environ if name.startswith(('OMPI_', 'PMIX_', 'SLURM_PROCID'))]
print(rank, int(total), os.environ['GROUP_RANK'], os.environ.get('OF_JOB'), mine)
"""
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]


@pytest.fixture(scope="module")
def kernel() -> Iterator[Kernel]:
    """A notebook without a session."""
    with Kernel() as found, sharing(found):
        found.ok("%load_ext nbdist")
        yield found


def start(kernel: Kernel, file: Path, nodes: int) -> tuple[Execution, list[str]]:
    """Start a session whose nodes find their tokens in a file; and what they are to run, without the Python."""
    cell = kernel.start(f"%distributed start --num-nodes {nodes} --master-addr 127.0.0.1 --token-file {file} -n 1")
    cell.wait_for("--token-file")
    line = re.findall(r"nbdist (join \S+ --token-file \S+)", cell.outcome.stdout)[0]
    return cell, line.split()


@pytest.fixture
def mpirun() -> list[str]:
    """Open MPI's launcher. Skips the test where there is none."""
    if shutil.which("mpirun") is None:
        pytest.skip("there is no `mpirun` here (Debian calls its package openmpi-bin)")
    as_root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
    return ["mpirun", "--oversubscribe", "--bind-to", "none", *as_root]


@contextmanager
def job(command: list[str], **environment: str) -> Iterator[subprocess.Popen[str]]:
    """A program that runs until the end, and is asked to end then."""
    process = subprocess.Popen(
        command,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.terminate()
        process.communicate(timeout=60)


def said_by(process: subprocess.Popen[str]) -> str:
    """What a program has printed, once it has ended by itself."""
    return process.communicate(timeout=60)[0]


def torchrun(join: list[str], node: int, nodes: int, port: int, processes: int = 2) -> list[str]:
    where = [f"--nnodes={nodes}", f"--node-rank={node}", f"--master-port={port}", "--master-addr=127.0.0.1"]
    return [*TORCHRUN, *where, f"--nproc-per-node={processes}", "-m", "nbdist", *join]


def test_torchrun_on_two_nodes_is_two_nodes_in_its_order(kernel: Kernel, tmp_path: Path) -> None:
    cell, join = start(kernel, tmp_path / "tokens", 3)
    assert (tmp_path / "tokens").stat().st_mode & 0o777 == 0o600
    port = free_port()
    with ExitStack() as jobs:
        second, first = (
            jobs.enter_context(job(torchrun(join, node, 2, port), OF_JOB=f"node-{node}")) for node in (1, 0)
        )
        outcome = cell.finish()
        assert "3 ranks on 3 nodes ready" in outcome.stdout, str(outcome)
        assert not (tmp_path / "tokens").exists()
        said = kernel.run(f"%%distributed\n{SUM}").stdout
        assert ") 1 3 1 node-0 []" in said and ") 2 3 2 node-1 []" in said, said
        kernel.ok("%distributed stop")
        for process in (first, second):
            assert said_by(process).count("the session has ended") == 1
            assert process.returncode == 0


def test_mpirun_is_one_node_and_its_ranks_see_nothing_of_it(kernel: Kernel, tmp_path: Path, mpirun: list[str]) -> None:
    cell, join = start(kernel, tmp_path / "tokens", 2)
    with job([*mpirun, "-np", "3", sys.executable, "-m", "nbdist", *join], OF_JOB="yes") as process:
        outcome = cell.finish()
        assert "2 ranks on 2 nodes ready" in outcome.stdout, str(outcome)
        assert ") 1 2 1 yes []" in kernel.run(f"%%distributed\n{SUM}").stdout
        kernel.ok("%distributed stop")
        assert said_by(process).count("the session has ended") == 1
        assert process.returncode == 0


def test_a_job_that_is_ended_is_a_lost_node(kernel: Kernel, tmp_path: Path, mpirun: list[str]) -> None:
    cell, join = start(kernel, tmp_path / "tokens", 2)
    with job([*mpirun, "-np", "2", sys.executable, "-m", "nbdist", *join]) as process:
        assert cell.finish().status == "ok"
        children = psutil.Process(process.pid).children(recursive=True)
        cell = kernel.start("%%distributed\nprint('at it')\nimport time\nif rank: time.sleep(100)")
        cell.wait_for_ranks(2, "at it")
        process.send_signal(signal.SIGTERM)
        outcome = cell.finish()
        assert outcome.ename == "RankDied" and "is lost" in str(outcome), str(outcome)
        assert psutil.wait_procs(children, timeout=20)[1] == []
    kernel.ok("%distributed stop")


def test_a_killed_process_that_was_the_node_ends_the_others(kernel: Kernel, tmp_path: Path) -> None:
    cell, join = start(kernel, tmp_path / "tokens", 2)
    with job(torchrun(join, 0, 1, free_port())) as process:
        assert cell.finish().status == "ok"
        node = next(found for found in psutil.Process(process.pid).children() if found.children())
        node.send_signal(signal.SIGKILL)
        assert process.wait(60) == 1
    kernel.ok("%distributed stop")


def test_nodes_whose_launcher_does_not_number_them_take_what_is_left(kernel: Kernel, tmp_path: Path) -> None:
    cell, join = start(kernel, tmp_path / "tokens", 3)
    with ExitStack() as jobs:
        for _ in range(2):
            jobs.enter_context(job([sys.executable, "-m", "nbdist", *join]))
        outcome = cell.finish()
        assert "3 ranks on 3 nodes ready" in outcome.stdout, str(outcome)
        kernel.ok("%distributed stop")


def test_a_job_with_more_nodes_than_tokens_is_refused(kernel: Kernel, tmp_path: Path) -> None:
    cell, join = start(kernel, tmp_path / "tokens", 3)
    place = {"SLURM_LOCALID": "0", "SLURM_NODEID": "2"}
    with job([sys.executable, "-m", "nbdist", *join], **place) as process:
        said = said_by(process)
    assert process.returncode == 2
    assert "this is node 2 of its job (counting from 0), but there are tokens for only 2 nodes" in said, said
    kernel.interrupt()
    assert cell.finish().ename == "KeyboardInterrupt"
    assert not (tmp_path / "tokens").exists()


def test_a_refusal_is_said_once_and_is_the_exit_code_of_all(kernel: Kernel, tmp_path: Path, mpirun: list[str]) -> None:
    cell, join = start(kernel, tmp_path / "tokens", 2)
    used = tmp_path / "used"
    used.write_text((tmp_path / "tokens").read_text())
    with job([sys.executable, "-m", "nbdist", *join]):
        assert cell.finish().status == "ok"
        again = [*join[:-1], str(used)]
        with job([*mpirun, "-np", "1", sys.executable, "-m", "nbdist", *again]) as process:
            said = said_by(process)
        assert "token is no longer valid" in said, said
        assert process.returncode == 2
        kernel.ok("%distributed stop")


def test_a_node_that_mpirun_has_bound_to_a_core_says_what_lets_it_use_all() -> None:
    token = base64.urlsafe_b64encode(bytes(64)).decode().rstrip("=")
    core = str(min(os.sched_getaffinity(0)))
    command = ["taskset", "--cpu-list", core, sys.executable, "-m", "nbdist", "join", "127.0.0.1:1"]
    with job(command, NBDIST_TOKEN=token, OMPI_COMM_WORLD_RANK="0") as process:
        said = said_by(process)
    assert process.returncode == 2 and "nothing listens there" in said, said
    bound = "mpirun lets this node use 1 of its" in said and "`mpirun --bind-to none` lets it use all" in said
    assert bound == ((os.cpu_count() or 1) > 1), said


def test_srun_with_two_tasks_a_node_is_a_node_each(
    kernel: Kernel, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    with slurm_cluster(tmp_path_factory.mktemp("slurm")) as cluster:  # a short path: sockets lie there
        cell, join = start(kernel, tmp_path / "tokens", 3)
        command = ["srun", "--nodes=2", "--nodelist=slurm-a,slurm-b", "--ntasks=4", "--ntasks-per-node=2", "--mpi=none"]
        with job([*command, sys.executable, "-m", "nbdist", *join], **cluster.environment) as process:
            outcome = cell.finish()
            assert "3 ranks on 3 nodes ready" in outcome.stdout, str(outcome)
            said = kernel.run("%%distributed\nimport os\nprint(rank, os.environ.get('SLURMD_NODENAME'))").stdout
            assert ") 1 slurm-a" in said and ") 2 slurm-b" in said, said
            kernel.ok("%distributed stop")
            assert said_by(process).count("the session has ended") == 2
            assert process.returncode == 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("--num-nodes 2 --master-addr 127.0.0.1 --token-file /etc/passwd", "/etc/passwd already exists"),
        ("--num-nodes 2 --master-addr 127.0.0.1 --token-file /nowhere/tokens", "can't write to /nowhere"),
        ("--token-file /tmp/tokens", "add `--num-nodes 2`"),
        ("--hosts localhost:0,nowhere --token-file /tmp/tokens", "token_file is for nodes that you start yourself"),
    ],
)
def test_a_file_that_cannot_be_is_refused_before_anything_starts(kernel: Kernel, arguments: str, words: str) -> None:
    assert words in kernel.fails(f"%distributed start {arguments} -n 1", "UsageError").evalue
