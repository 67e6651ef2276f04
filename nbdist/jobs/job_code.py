"""Code that is run in a job, and what came of it by rank, and as text: equal output of several ranks once."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from nbdist.base.checks import LONGEST
from nbdist.base.ranks import describe_ranks, parse_ranks
from nbdist.base.text import duration
from nbdist.errors import RankError, RankFailure, UsageError
from nbdist.jobs.found_jobs import FoundJob
from nbdist.jobs.job_pause import LIMIT, Unended, paused
from nbdist.jobs.rank_lines import merged_texts
from nbdist.serving.control_messages import CodeRan


@dataclass
class JobOutput:
    """What came of code.

    Attributes:
        job: The name of the job.
        printed: What ranks printed, with their last values, by rank.
        text: The same, equal lines once.
        failures: What went wrong, by rank.
        report: The same as text.
        pause: After which step the job was paused, and for how long.
    """

    job: str
    printed: dict[int, str] = field(default_factory=dict)
    text: str = ""
    failures: dict[int, RankFailure] = field(default_factory=dict)
    report: str = ""
    pause: str = ""

    @property
    def error(self) -> RankError | None:
        """What to raise."""
        if not self.failures:
            return None
        first = next(iter(self.failures.values()))
        return RankError(
            f"{describe_ranks(self.failures)} of job {self.job}: {first.text}\n{self.report.rstrip()}", self.failures
        )


def run_in_job(job: FoundJob, codes: Sequence[str], ranks: str = "all", limit: float = LIMIT) -> JobOutput:
    """Run code in a job, in one pause of all its ranks.

    Args:
        job: The job.
        codes: Python, one after another. What follows one that fails is not run.
        ranks: Which ranks run it, as "0,2-3".
        limit: Seconds for which the job is paused at most.

    Raises:
        UsageError: It can't be run; the text says why.
    """
    if not 0 < limit <= LONGEST:
        raise UsageError(f"invalid limit {limit!r}: use a number of seconds greater than 0, for example 60")
    for code in codes:
        _check_syntax(code)
    chosen = parse_ranks(ranks, job.world_size, of="job")
    output = JobOutput(job.name)
    with paused(job, limit) as pause:
        for code in codes:
            _take(output, pause.run(code, chosen))
            if output.failures:
                break
    output.pause = f"paused after step {pause.step:,} for {duration(pause.seconds)}"
    return output


def _check_syntax(code: str) -> None:
    try:
        compile(code, "<look>", "exec")
    except SyntaxError as error:
        raise UsageError(f"invalid code, so nothing was run: {error.msg} in line {error.lineno}: {code!r}") from None


def _take(output: JobOutput, ends: Mapping[int, CodeRan | Unended]) -> None:
    printed = {rank: end.printed if isinstance(end, CodeRan) else [] for rank, end in ends.items()}
    failures = {rank: failure for rank, end in ends.items() if (failure := _failure(rank, end)) is not None}
    for rank, texts in printed.items():
        output.printed[rank] = output.printed.get(rank, "") + "".join(text for _, text in texts)
    output.failures |= failures
    output.text += merged_texts(printed)
    output.report += merged_texts({rank: [("stderr", each.traceback)] for rank, each in failures.items()})


def _failure(rank: int, end: CodeRan | Unended) -> RankFailure | None:
    if isinstance(end, Unended):
        text = f"this rank {end.why}"
        return RankFailure(rank, "died" if end.died else "running", "", text, f"{text}\n", time.monotonic())
    if end.failure is None:
        return None
    kind = "raised" if end.failure.name else "interrupted"
    return RankFailure(rank, kind, end.failure.name, end.failure.text, end.failure.traceback, time.monotonic())
