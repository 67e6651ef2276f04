"""Nodes by Slurm: one `srun` with a task for each node, in the allocation that we are in, or in one of its own.

Such an allocation lives as long as its `srun`: none is left behind, however that ends.
"""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence

import msgspec

from nbdist.base.checks import LONGEST, check_seconds, check_whole
from nbdist.base.text import counted
from nbdist.cluster.engines.engine import JOIN_LIMIT, Layout
from nbdist.cluster.engines.remote import NO_NBDIST, Remote, ended, join_command
from nbdist.errors import UsageError
from nbdist.wire.processes.starter_lines import Invitation, Report, StarterFailed, StarterProgress

_TICK = 1.0  # seconds
_LONGEST_PAUSE = 30.0  # seconds between questions to Slurm's controller, which serves the whole cluster
_ASK_LIMIT = 20.0  # seconds for it to answer
_EXAMPLE = "`%distributed start --slurm --num-nodes 2 --partition gpu --gres gpu:8`"
_OF_REQUEST = ("nodes", "partition", "account", "time", "gres", "constraint")
_KEPT = ("SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_CLUSTERS")  # which cluster; the rest is of the job that we are in


class SlurmOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a user can set.

    nodes, partition, account, time, gres, constraint: as for sbatch. arguments: others for srun. python: the Python
    there; "": at the path of this one. wait: seconds for the allocation to come; None: as long as it takes.
    """

    nodes: int | None = None
    partition: str | int = ""
    account: str | int = ""
    time: str | int = ""
    gres: str = ""
    constraint: str = ""
    arguments: list[str] = []
    python: str = ""
    wait: float | None = None


class Slurm:
    """The engine."""

    Options = SlurmOptions

    def __init__(self, options: SlurmOptions) -> None:
        self._options = options
        self._job = os.environ.get("SLURM_JOB_ID", "")
        self._name = f"nbdist-{secrets.token_hex(6)}"
        self._srun: Remote | None = None

    @classmethod
    def check(cls, options: SlurmOptions) -> Layout:
        """Return the nodes; nothing is asked for yet."""
        if shutil.which("srun") is None:
            raise UsageError(
                "there is no `srun` here: --slurm is for machines of a Slurm cluster. If this is one, add its "
                "programs to PATH; for other machines, use `--hosts node-a,node-b`"
            )
        check_seconds("wait", options.wait)  # `watch` sees to it
        if "SLURM_JOB_ID" not in os.environ:
            if options.nodes is None:
                raise UsageError(f"give the number of nodes to ask Slurm for: {_EXAMPLE}")
            count = check_whole("the number of nodes", options.nodes, 1, _EXAMPLE)
            name = options.partition
            which = f"--partition={name}" if name else ""
            where = _address_of(which, f"partition {name!r}" if name else "the default partition")
            return Layout([None] * count, 0, where, LONGEST)
        given = [f"--{'num-nodes' if name == 'nodes' else name}" for name in _OF_REQUEST if getattr(options, name)]
        if given:
            job = os.environ["SLURM_JOB_ID"]
            raise UsageError(f"the notebook runs in Slurm job {job} and uses its nodes: leave out {', '.join(given)}")
        others = _other_nodes()
        if not others:
            raise UsageError(
                "this Slurm job has no other node: to use only this one, type `%distributed start` without --slurm"
            )
        where = _address_of(f"--nodes={others[0]}", f"node {others[0]!r}")
        return Layout([None] * len(others), 0 if _own_node() not in _nodes_of_job() else None, where)

    def start(self, invitation: Invitation) -> None:
        """Start one srun for all seats."""
        count = len(invitation.seats)
        which = self._in_job([seat.number for seat in invitation.seats]) if self._job else self._own_job()
        command = [
            *("srun", f"--nodes={count}", f"--ntasks={count}", "--ntasks-per-node=1", f"--job-name={self._name}"),
            *("--kill-on-bad-exit=0", "--no-kill", "--cpu-bind=none", "--mpi=none", "--input=all", *which),
            *self._options.arguments,
            *join_command(self._options.python or sys.executable, invitation.address, by_task=True),
        ]
        environment = {
            name: value
            for name, value in os.environ.items()
            if name in _KEPT or not name.startswith(("SLURM_", "SRUN_"))
        }
        self._srun = Remote(command, [seat.token for seat in invitation.seats], environment)

    def _in_job(self, seats: Sequence[int]) -> list[str]:
        nodes = _other_nodes()
        if max(seats) > len(nodes):
            raise UsageError(
                f"the Slurm job {self._job} has {counted(len(nodes), 'other node')}, and no node is left unused: "
                "`%distributed grow -n 1` adds ranks on the present ones"
            )
        return [f"--jobid={self._job}", "--overlap", f"--nodelist={','.join(nodes[seat - 1] for seat in seats)}"]

    def _own_job(self) -> list[str]:
        names = [name for name in _OF_REQUEST if name != "nodes"]
        return [f"--{name}={value}" for name in names if (value := getattr(self._options, name))]

    def watch(self) -> Iterator[Report]:
        """Yield the state of the job until it runs, then its end."""
        assert self._srun is not None
        waiting = not self._job
        pause, ask_at, gave_up_at = _TICK, 0.0, time.monotonic() + (self._options.wait or LONGEST)
        said = ""
        while True:
            for key in ended({0: self._srun}, _TICK if waiting else None):
                if key is not None:
                    yield StarterFailed(self._explain(self._srun))
                    return
                now = time.monotonic()
                if now < min(ask_at, gave_up_at):
                    continue
                pause, ask_at = min(2 * pause, _LONGEST_PAUSE), now + pause
                state = _state_of(self._name)
                if state == "RUNNING":
                    yield StarterProgress("Slurm has provided the nodes" if said else "", JOIN_LIMIT)
                    waiting = False
                    break
                if state and state != said:
                    said = state
                    yield StarterProgress(f"waiting for Slurm: {state}; Ctrl-C cancels")
                if now > gave_up_at:
                    yield StarterFailed(
                        f"Slurm did not provide the nodes within {self._options.wait:g} s ({said or 'no answer'}): the "
                        "request is canceled. Ask for fewer nodes or less time, or wait longer"
                    )
                    return

    def stop(self) -> None:
        """Cancel the job, or end the step."""
        if self._srun is None:
            return
        self._srun.let_go()
        if not self._job:
            _ask("scancel", f"--name={self._name}", f"--user={os.getuid()}")
        self._srun.end()

    def _explain(self, srun: Remote) -> str:
        python = self._options.python or sys.executable
        if srun.wait() == NO_NBDIST:
            return f"{python} has no nbdist on the nodes: name a Python that has it with `--python PATH`"
        return f"Slurm's srun has ended: {srun.last_lines or 'it gave no reason'}"


def _state_of(name: str) -> str:
    """Return the state of a job, in words; "RUNNING", and "": it is not known yet, or has ended."""
    mine = _ask("squeue", "--noheader", f"--user={os.getuid()}", f"--name={name}", "--format=%i|%T|%r|%S|%P")
    if not mine:
        return ""
    number, state, reason, begin, partition = mine[0].split("|", 4)
    if state != "PENDING":
        return state
    queue = _ask("squeue", "--noheader", "--states=PENDING", f"--partition={partition}", "--sort=-p,i", "--format=%i")
    place = f", number {queue.index(number) + 1} of {len(queue)} in partition {partition}" if number in queue else ""
    expected = "" if begin == "N/A" else f", expected to start at {begin}"
    return f"job {number} is pending ({reason}){place}{expected}"


def _other_nodes() -> list[str]:
    return [node for node in _nodes_of_job() if node != _own_node()]


def _own_node() -> str:
    return os.environ.get("SLURMD_NODENAME", "")


def _nodes_of_job() -> list[str]:
    return _ask("scontrol", "show", "hostnames", os.environ.get("SLURM_JOB_NODELIST", ""))


def _address_of(filter: str, what: str) -> str:
    """Return the address of the first node that sinfo finds.

    Raises:
        UsageError: It finds none.
    """
    addresses = _ask("sinfo", "--noheader", "--Node", "--format=%o", *([filter] if filter else []))
    if not addresses:
        raise UsageError(f"{what} of Slurm has no nodes, or Slurm does not answer: `sinfo` shows what there is")
    return addresses[0]


def _ask(*command: str) -> list[str]:
    """Return the lines that one of Slurm's programs prints; none where it fails."""
    try:
        found = subprocess.run(command, check=False, capture_output=True, text=True, timeout=_ASK_LIMIT)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return [line.strip() for line in found.stdout.splitlines() if line.strip()]
