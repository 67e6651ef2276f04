"""Which job a process belongs to, by what launchers leave in the environment of its ranks."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

_RANKS = (  # of torchrun and Accelerate, Slurm, Open MPI, MPICH: rank and number of ranks
    ("RANK", "WORLD_SIZE"),
    ("SLURM_PROCID", "SLURM_NTASKS"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("PMI_RANK", "PMI_SIZE"),
)
_OF_JOB = ("TORCHELASTIC_RUN_ID", "SLURM_JOB_ID", "SLURM_STEP_ID", "PMIX_NAMESPACE", "MASTER_ADDR", "MASTER_PORT")
_NAME = 8  # characters


@dataclass(frozen=True)
class JobIdentity:
    """A process among those of its job.

    Attributes:
        job: A short name, the same for all of them.
        rank: Its number among them.
        world_size: How many they are.
    """

    job: str
    rank: int
    world_size: int


def identify(environment: Mapping[str, str], pid: int) -> JobIdentity | None:
    """Return the job of a process with this environment; None: no launcher has started it as a rank."""
    for rank, count in _RANKS:
        if environment.get(rank, "").isdecimal() and environment.get(count, "").isdecimal():
            marks = [environment.get(name, "") for name in _OF_JOB]
            text = "\n".join(marks) if any(marks) else str(pid)
            job = hashlib.blake2b(text.encode(), digest_size=_NAME // 2).hexdigest()
            return JobIdentity(job, int(environment[rank]), int(environment[count]))
    return None


def identify_alone(pid: int) -> JobIdentity:
    """Return the job of a process that no launcher has started: its own."""
    return JobIdentity(hashlib.blake2b(str(pid).encode(), digest_size=_NAME // 2).hexdigest(), 0, 1)
