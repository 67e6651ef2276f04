"""A Slurm cluster on this machine: its controller, and a daemon for each of three nodes."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from testbed.ports import free_port

_UP_LIMIT = 30.0  # seconds


@dataclass
class SlurmCluster:
    """A cluster with the nodes slurm-a, slurm-b and slurm-c.

    Attributes:
        environment: What its programs need to be set.
        daemons: Its processes.
    """

    environment: dict[str, str]
    daemons: list[subprocess.Popen[bytes]]

    def ask(self, *command: str) -> str:
        """What one of its programs prints."""
        environment = {**os.environ, **self.environment}
        return subprocess.run(command, check=True, capture_output=True, text=True, env=environment).stdout

    def jobs(self) -> list[str]:
        """Those that wait or run."""
        return self.ask("squeue", "--noheader", "--states=PENDING,RUNNING", "--format=%j").split()

    def await_no_jobs(self) -> bool:
        """Whether all jobs end in time."""
        deadline = time.monotonic() + _UP_LIMIT
        while self.jobs() and time.monotonic() < deadline:
            time.sleep(0.05)  # Slurm lets nobody wait for that
        return not self.jobs()


@contextlib.contextmanager
def slurm_cluster(folder: Path) -> Iterator[SlurmCluster]:
    """Run a cluster until the end. Skips the test where there is no Slurm."""
    places = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
    programs = {name: shutil.which(name, path=places) for name in ("munged", "slurmctld", "slurmd", "srun")}
    if missing := [name for name, path in programs.items() if path is None]:
        pytest.skip(f"there is no {missing[0]} here (Debian calls the package slurm-wlm)")
    if os.geteuid() != 0:
        pytest.skip("Slurm's daemons need root here")
    key, munge = folder / "munge.key", folder / "munge.socket"
    key.write_bytes(os.urandom(128))
    key.chmod(0o600)
    for name in ("state", "spool-slurm-a", "spool-slurm-b", "spool-slurm-c"):
        (folder / name).mkdir()
    ports = [free_port() for _ in range(4)]
    config = folder / "slurm.conf"
    config.write_text(
        f"""ClusterName=nbdist
SlurmctldHost=localhost(127.0.0.1)
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={munge}
CryptoType=crypto/munge
SlurmctldPort={ports[0]}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/pgid
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
ReturnToService=2
SelectType=select/cons_tres
SchedulerParameters=sched_interval=1,batch_sched_delay=0
KillWait=2
SlurmdParameters=config_overrides
NodeName=slurm-a NodeHostname={socket.gethostname()} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=2 State=UNKNOWN
NodeName=slurm-b NodeHostname={socket.gethostname()} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=2 State=UNKNOWN
NodeName=slurm-c NodeHostname={socket.gethostname()} NodeAddr=127.0.0.1 Port={ports[3]} CPUs=2 State=UNKNOWN
PartitionName=main Nodes=slurm-a,slurm-b,slurm-c Default=YES MaxTime=60 State=UP
PartitionName=closed Nodes=slurm-a,slurm-b,slurm-c MaxTime=60 State=DOWN
"""
    )
    cluster = SlurmCluster({"SLURM_CONF": str(config)}, [])
    munged = [
        *(str(programs["munged"]), "--foreground", "--force", f"--key-file={key}", f"--socket={munge}"),
        *(f"--pid-file={folder}/munged.pid", f"--log-file={folder}/munged.log", f"--seed-file={folder}/munged.seed"),
    ]
    with contextlib.ExitStack() as ends:
        cluster.daemons.append(_run(ends, munged, {}))
        _await(munge.exists, "munged")
        cluster.daemons.append(_run(ends, [str(programs["slurmctld"]), "-D"], cluster.environment))
        for node in ("slurm-a", "slurm-b", "slurm-c"):
            cluster.daemons.append(_run(ends, [str(programs["slurmd"]), "-D", "-N", node], cluster.environment))
        _await(lambda: _idle_nodes(cluster) == 3, "three nodes of Slurm")
        yield cluster


def _idle_nodes(cluster: SlurmCluster) -> int:
    try:
        return len(cluster.ask("sinfo", "--noheader", "--Node", "--partition=main", "--states=idle").splitlines())
    except subprocess.CalledProcessError:
        return 0


def _run(ends: contextlib.ExitStack, command: list[str], environment: dict[str, str]) -> subprocess.Popen[bytes]:
    process = subprocess.Popen(
        command, env={**os.environ, **environment}, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )

    def end() -> None:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    ends.callback(end)
    return process


def _await(done: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + _UP_LIMIT
    while not done():
        assert time.monotonic() < deadline, f"{what} did not come up"
        time.sleep(0.05)
