"""What a job launcher (torchrun, mpirun, srun, a Kubernetes Job) has set in this process's environment.

The one place that knows their variables. Starts nothing.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from nbdist.base.text import counted
from nbdist.errors import UsageError


@dataclass(frozen=True)
class _Launcher:
    """One of them.

    Attributes:
        name: The command.
        mark: A variable that only it sets, in each process.
        node: The variable with the node's place in the job; "": it has none, but `rank` and `local_size`.
        rank: The variable with the process's place in the job.
        local_size: The variable with the number of processes on this node.
        unbound: What keeps it from binding processes to cores.
    """

    name: str
    mark: str
    node: str = ""
    rank: str = ""
    local_size: str = ""
    unbound: str = ""


# The innermost first: `srun torchrun` sets the variables of both.
_LAUNCHERS = (
    _Launcher("torchrun", "TORCHELASTIC_RUN_ID", "GROUP_RANK"),
    _Launcher(
        "mpirun",
        "OMPI_COMM_WORLD_RANK",
        rank="OMPI_COMM_WORLD_RANK",
        local_size="OMPI_COMM_WORLD_LOCAL_SIZE",
        unbound="mpirun --bind-to none",
    ),
    _Launcher(
        "mpiexec", "MPI_LOCALRANKID", rank="PMI_RANK", local_size="MPI_LOCALNRANKS", unbound="mpiexec -bind-to none"
    ),
    _Launcher("mpiexec", "PALS_NODEID", "PALS_NODEID", unbound="mpiexec --cpu-bind none"),
    _Launcher("srun", "SLURM_LOCALID", "SLURM_NODEID"),
    _Launcher("Kubernetes", "JOB_COMPLETION_INDEX", "JOB_COMPLETION_INDEX"),
)

# What describes one process of a job. Ranks have a place of their own, which this would contradict.
_OF_A_PROCESS = {
    *("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "ROLE_NAME", "MASTER_ADDR", "MASTER_PORT"),
    *("WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE"),
    *("SLURM_PROCID", "SLURM_LOCALID", "JOB_COMPLETION_INDEX"),
}
_PREFIXES_OF_A_PROCESS = ("MPI_LOCAL", "OMPI_", "PALS_", "PMIX_", "PMI_", "PRTE_", "TORCHELASTIC_")


@dataclass(frozen=True)
class JobPlace:
    """The place of this process in the job that a launcher has started.

    Attributes:
        launcher: Its command.
        node: The place of this node in the job, from 0; None: the launcher does not number nodes.
        guess: What that place probably is.
        unbound: What keeps the launcher from binding processes to cores; "": it does not.
    """

    launcher: str
    node: int | None
    guess: int
    unbound: str = ""


def job_place(environment: Mapping[str, str]) -> JobPlace | None:
    """Return the place that these variables describe; None: no launcher has set any."""
    for known in _LAUNCHERS:
        if known.mark in environment:
            node = _number(environment, known.node)
            rank, size = _number(environment, known.rank) or 0, _number(environment, known.local_size) or 1
            return JobPlace(known.name, node, rank // size if node is None else node, known.unbound)
    return None


# Where launchers say which rank a process is, and of how many. The innermost first. Slurm's batch script, which is no
# rank, has SLURM_PROCID as well, but is no step.
_RANKS = (
    ("RANK", "WORLD_SIZE"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("PMI_RANK", "PMI_SIZE"),
    ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
)
_OF_A_JOB = ("TORCHELASTIC_RUN_ID", "SLURM_JOB_ID", "SLURM_STEP_ID", "PMIX_NAMESPACE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class RankOfJob:
    """A process among those that a launcher has started together.

    Attributes:
        job: What all of them have in common, and no other job's.
        rank: Its number among them.
        world_size: How many they are.
    """

    job: tuple[str, ...]
    rank: int
    world_size: int


def rank_of_job(environment: Mapping[str, str]) -> RankOfJob | None:
    """Return the rank that these variables describe; None: no launcher has set any."""
    for names in _RANKS:
        rank, world_size = (_number(environment, name) for name in names)
        if rank is not None and world_size is not None:
            return RankOfJob(tuple(environment.get(name, "") for name in _OF_A_JOB), rank, world_size)
    return None


def _number(environment: Mapping[str, str], name: str) -> int | None:
    text = environment.get(name, "")
    return int(text) if text.isdecimal() else None


END_VARIABLE = "SLURM_JOB_END_TIME"  # seconds since 1970
_NO_END = 300 * 86400.0  # seconds: a job without a limit is said to end in a year


def job_end(environment: Mapping[str, str]) -> float | None:
    """Return when this process's job ends, by `time.time`; None: it is in none, or none that ends is known."""
    at = _number(environment, END_VARIABLE)
    return float(at) if at is not None and 0 < at - time.time() < _NO_END else None


def without_place(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables without those that describe one process of a job."""
    return {
        name: value
        for name, value in environment.items()
        if name not in _OF_A_PROCESS and not name.startswith(_PREFIXES_OF_A_PROCESS)
    }


def tokens_to_try(tokens: Sequence[str], place: JobPlace | None) -> list[str]:
    """Return the tokens that this node may join with, the first to try first.

    Args:
        tokens: One, or one for each node of the job, in the order of its nodes.
        place: The place of this process in its job, if there is one.

    Raises:
        UsageError: The job has more nodes than there are tokens.
    """
    if len(tokens) == 1 or place is None:
        return list(tokens)
    if place.node is None:
        first = place.guess % len(tokens)
        return [*tokens[first:], *tokens[:first]]
    if place.node >= len(tokens):
        there = counted(len(tokens), "node")
        raise UsageError(
            f"this is node {place.node} of its job (counting from 0), but there are tokens for only {there}: start "
            f"the job on {there}, or the session with `--num-nodes {place.node + 2}`"
        )
    return [tokens[place.node]]


def binding(place: JobPlace | None) -> str:
    """Return a note if the launcher has bound this process, and so all ranks of this node, to some cores; else ""."""
    own, all_cores = len(os.sched_getaffinity(0)), os.cpu_count() or 1
    if place is None or not place.unbound or own == all_cores:
        return ""
    cores = f"{own} of its {counted(all_cores, 'core')}"
    return f"{place.launcher} lets this node use {cores}; `{place.unbound}` lets it use all"
