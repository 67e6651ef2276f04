"""Which node of a job this is, by what its launcher has set, and which tokens that node may take."""

from __future__ import annotations

import pytest

from nbdist.cluster.launchers import job_place, rank_of_job, tokens_to_try, without_place
from nbdist.errors import UsageError

TORCHRUN = {"TORCHELASTIC_RUN_ID": "none", "GROUP_RANK": "1", "LOCAL_RANK": "3", "RANK": "7"}
SRUN = {"SLURM_LOCALID": "2", "SLURM_NODEID": "2", "SLURM_PROCID": "6"}
OPEN_MPI = {"OMPI_COMM_WORLD_RANK": "5", "OMPI_COMM_WORLD_LOCAL_RANK": "1", "OMPI_COMM_WORLD_LOCAL_SIZE": "4"}
MPICH = {"PMI_RANK": "2", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "2"}
POD = {"JOB_COMPLETION_INDEX": "2"}


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        (TORCHRUN, ("torchrun", 1, 1)),
        ({**SRUN, **TORCHRUN}, ("torchrun", 1, 1)),
        (SRUN, ("srun", 2, 2)),
        (OPEN_MPI, ("mpirun", None, 1)),
        (MPICH, ("mpiexec", None, 1)),
        (POD, ("Kubernetes", 2, 2)),
    ],
)
def test_the_place_is_what_the_innermost_launcher_says(
    environment: dict[str, str], expected: tuple[str, int | None, int]
) -> None:
    place = job_place(environment)
    assert place is not None and (place.launcher, place.node, place.guess) == expected


@pytest.mark.parametrize("environment", [{}, {"LOCAL_RANK": "0"}, {"SLURM_JOB_ID": "7", "SLURM_NNODES": "2"}])
def test_there_is_no_place_outside_of_a_job(environment: dict[str, str]) -> None:
    assert job_place(environment) is None


@pytest.mark.parametrize(
    ("environment", "expected"),
    [(TORCHRUN, ["b"]), (SRUN, ["c"]), (OPEN_MPI, ["b", "c", "a"]), ({}, ["a", "b", "c"])],
)
def test_a_node_takes_the_token_of_its_place_or_tries_all(environment: dict[str, str], expected: list[str]) -> None:
    assert tokens_to_try(["a", "b", "c"], job_place(environment)) == expected


def test_one_token_is_for_whoever_has_it() -> None:
    assert tokens_to_try(["a"], job_place(SRUN)) == ["a"]


def test_a_node_without_a_token_is_refused() -> None:
    with pytest.raises(UsageError, match=r"node 2 of its job .* start the job on 2 nodes, or .* `--num-nodes 4`"):
        tokens_to_try(["a", "b"], job_place(SRUN))


def test_what_describes_a_process_does_not_reach_ranks() -> None:
    kept = {"SLURM_JOB_ID": "7", "PATH": "/bin", "NCCL_DEBUG": "INFO"}
    assert without_place({**kept, **TORCHRUN, **SRUN, **OPEN_MPI, **MPICH, **POD}) == {**kept, "SLURM_NODEID": "2"}


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"RANK": "7", "WORLD_SIZE": "8", "SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2"}, (7, 8)),
        ({"OMPI_COMM_WORLD_RANK": "5", "OMPI_COMM_WORLD_SIZE": "6"}, (5, 6)),
        ({"PMI_RANK": "2", "PMI_SIZE": "4"}, (2, 4)),
        ({"SLURM_PROCID": "6", "SLURM_STEP_NUM_TASKS": "16"}, (6, 16)),
    ],
)
def test_the_rank_in_a_job_is_what_the_innermost_launcher_says(
    environment: dict[str, str], expected: tuple[int, int]
) -> None:
    found = rank_of_job(environment)
    assert found is not None and (found.rank, found.world_size) == expected


@pytest.mark.parametrize("environment", [{}, {"RANK": "0"}, {"SLURM_PROCID": "0", "SLURM_NTASKS": "8"}])
def test_a_batch_script_of_slurm_and_a_process_of_nobody_are_no_ranks(environment: dict[str, str]) -> None:
    assert rank_of_job(environment) is None


def test_ranks_of_one_job_have_its_marks_in_common_and_no_others_do() -> None:
    own = {"WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1"}
    first, second = (rank_of_job({**own, "RANK": rank}) for rank in "01")
    other = rank_of_job({**own, "RANK": "0", "MASTER_PORT": "2"})
    assert first and second and other and first.job == second.job != other.job
