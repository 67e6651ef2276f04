"""A job that others have started, in Python: `nbdist.job`."""

from __future__ import annotations

from collections.abc import Iterable

from nbdist.base.ranks import format_ranks
from nbdist.jobs.found_jobs import FoundJob
from nbdist.jobs.job_code import run_in_job
from nbdist.jobs.job_pause import LIMIT
from nbdist.jobs.job_report import named_job, report
from nbdist.serving.look_messages import RankLook


class Job:
    """A job of this user on this machine, which torchrun, srun, or another launcher has started.

    >>> job = nbdist.job("c9c2f4c6")
    >>> {rank: look.steps for rank, look in job.looks().items()}
    >>> job.run("loss.item()")[0]

    Attributes:
        name: In `nbdist ls`.
        world_size: Ranks on all machines.
    """

    def __init__(self, found: FoundJob) -> None:
        self._found = found
        self.name = found.name
        self.world_size = found.world_size

    def __repr__(self) -> str:
        return f"<nbdist job {self.name}, {self.world_size} ranks>"

    def look(self, *, stacks: bool = False, flight: int = 0, names: bool = False) -> str:
        """Return what `nbdist look` shows.

        Args:
            stacks: Whether to add where each rank is.
            flight: How many of the last collectives to add.
            names: Whether to add the names in the function that each rank is in.

        Raises:
            UsageError: The job does not answer, and py-spy can't be used either.
        """
        return report(self._found, stacks=stacks, collectives=flight, names=names)

    def looks(self) -> dict[int, RankLook]:
        """Return what each rank does, by rank: steps, line, stack, memory. Ranks that don't answer are left out."""
        return {rank: look for rank, look in self._found.look().items() if isinstance(look, RankLook)}

    def run(self, code: str, ranks: str | Iterable[int] = "all", limit: float = LIMIT) -> dict[int, str]:
        """Pause all ranks after the same step, run code there, and let them go on.

        Args:
            code: Python. It sees the names of the functions that train, and assigns in the main program.
            ranks: Which ranks run it: "0,2-3", or their numbers. All are paused.
            limit: Seconds that the job may be paused.

        Returns:
            What each rank printed, with the value of the last expression, by rank.

        Raises:
            RankError: Code failed on a rank. The job goes on.
            UsageError: The job can't be paused; the text says why. All ranks go on.
        """
        output = run_in_job(self._found, [code], ranks if isinstance(ranks, str) else format_ranks(ranks), limit)
        if output.error is not None:
            raise output.error
        return output.printed


def job(name: str = "") -> Job:
    """Return a job of this user on this machine that torchrun, srun, or another launcher has started.

    Args:
        name: Its name in `nbdist ls`, or the beginning of it; "": the only one.

    Raises:
        UsageError: There is none, or several.
    """
    return Job(named_job(name))
