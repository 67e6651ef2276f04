"""Code that is run in a job, and what came of it as text: equal output of several ranks once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from nbdist.base.ranks import parse_ranks
from nbdist.base.text import duration
from nbdist.client.output.merge import Merger
from nbdist.client.output.page import Text
from nbdist.errors import UsageError
from nbdist.jobs.found_jobs import FoundJob
from nbdist.jobs.job_pause import LIMIT, paused
from nbdist.serving.control_messages import CodeRan


@dataclass(frozen=True)
class JobOutput:
    """What came of code.

    Attributes:
        text: What ranks printed, and how long the job was paused.
        failed: Whether code failed on a rank.
    """

    text: str
    failed: bool


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
    for code in codes:
        _check_syntax(code)
    chosen = parse_ranks(ranks, job.world_size, of="job")
    texts = []
    failed = False
    with paused(job, limit) as pause:
        for code in codes:
            ends = pause.run(code, chosen)
            texts.append(_merged(ends))
            failed = any(not isinstance(end, CodeRan) or end.failed for end in ends.values())
            if failed:
                break
    texts.append(f"paused after step {pause.step:,} for {duration(pause.seconds)}")
    return JobOutput("".join(texts), failed)


def _check_syntax(code: str) -> None:
    try:
        compile(code, "<look>", "exec")
    except SyntaxError as error:
        raise UsageError(f"invalid code, so nothing was run: {error.msg} in line {error.lineno}: {code!r}") from None


def _merged(ends: Mapping[int, CodeRan | str]) -> str:
    merger = Merger(ends)
    for rank, end in ends.items():
        printed = end.printed if isinstance(end, CodeRan) else [("stderr", f"nbdist: this rank {end}\n")]
        for stream, text in printed:
            merger.feed(rank, "stderr" if stream == "stderr" else "stdout", text, 0.0)
        merger.finish(rank, 0.0)
    return "".join(each.text for each in merger.flush(0.0) if isinstance(each, Text))
