"""What is seen of a job, as text: its ranks in a table, their stacks, their last collectives side by side."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from nbdist.agent.slow_looks import NativeStacks
from nbdist.base.ranks import describe_ranks
from nbdist.base.text import counted, duration, size, span, table
from nbdist.client.reports import flight, stack_report
from nbdist.client.reports.stack_report import Stack
from nbdist.errors import UsageError
from nbdist.jobs.found_jobs import FoundJob, find_jobs
from nbdist.jobs.outside_names import names_from_outside
from nbdist.jobs.rank_lines import merged_lines
from nbdist.serving.look_messages import RankLook
from nbdist.wire.questions.stopping import NativeStack

_HOW = "start it as `torchrun ... -m nbdist serve SCRIPT`, or call `nbdist.serve()` in it"


def list_jobs(jobs: Sequence[FoundJob]) -> str:
    """Return jobs as a table, a row for each."""
    rows = []
    for job in jobs:
        looks = [each for each in job.look().values() if isinstance(each, RankLook)]
        steps = max((each.steps for each in looks), default=0)
        rows.append(
            (
                job.name,
                describe_ranks(each.rank for each in job.processes),
                job.world_size,
                Path(looks[0].script).name if looks else "?",
                f"{steps:,} steps" if looks else f"`nbdist look {job.name}` shows stacks",
                time.strftime("%Y-%m-%d %H:%M", time.localtime(looks[0].since)) if looks else "",
            )
        )
    return table(rows, ("job", "here", "ranks", "script", "does", "since"))


def named_job(name: str) -> FoundJob:
    """Return the job with this name, or one that begins so; "": the only one.

    Raises:
        UsageError: There is none, or several.
    """
    jobs = find_jobs()
    meant = [job for job in jobs if job.name.startswith(name)]
    if len(meant) == 1:
        return meant[0]
    names = ", ".join(job.name for job in jobs) or "none"
    what = f"there is no job {name!r}" if name and not meant else f"{counted(len(meant), 'job')} on this machine"
    raise UsageError(f"{what}: you have {names}. `nbdist ls` describes them; to have one answer, {_HOW}")


def report(job: FoundJob, *, stacks: bool = False, collectives: int = 0, names: bool = False) -> str:
    """Return what ranks do, a row for each, with what waits for what.

    Args:
        job: The job.
        stacks: Whether to add stacks, equal ones once. Always for a job that does not answer, by py-spy.
        collectives: How many of the last ones to add, side by side.
        names: Whether to add the names in the innermost function of the script, with short values.

    Raises:
        UsageError: It does not answer, and py-spy can't be used either; the text says why.
    """
    if not job.serves:
        return _from_outside(job, names=names)
    looks = job.look(collectives, names=names)
    parts = [_status(job, looks)]
    if wait := _wait(looks):
        parts.append(wait)
    if stacks:
        parts.append(stack_report.render({rank: _stack(look) for rank, look in looks.items()}))
    if collectives:
        parts.append(_flight(looks, collectives))
    if names:
        parts.append(
            merged_lines({rank: [look] if isinstance(look, str) else look.names for rank, look in looks.items()})
        )
    return "\n\n".join(parts)


def _status(job: FoundJob, looks: Mapping[int, RankLook | str]) -> str:
    pids = {each.rank: each.pid for each in job.processes}
    rows = [
        (rank, pids[rank], *_cells(look)) if isinstance(look, RankLook) else (rank, pids[rank], "", "", "", "", look)
        for rank, look in looks.items()
    ]
    return table(rows, ("rank", "pid", "steps", "last step", "memory", "GPU memory", "doing"))


def _cells(look: RankLook) -> tuple[str, ...]:
    rate = f" of {duration(look.step_seconds)}" if look.step_seconds else ""
    where = f"{look.line} (in {look.collective})" if look.collective else look.line
    where = f"paused by a look, after {where}" if look.paused else where
    return (
        f"{look.steps:,}{rate}",
        f"{span(look.since_step)} ago" if look.since_step >= 0 else "none yet",
        size(look.memory),
        size(look.gpu_memory) if look.gpu_memory >= 0 else "",
        where,
    )


def _wait(looks: Mapping[int, RankLook | str]) -> str:
    """Return who waits in collectives while others are elsewhere; "" if all or none are in one."""
    waiting: dict[str, list[int]] = {}
    others = []
    for rank, look in looks.items():
        if isinstance(look, RankLook) and look.collective not in ("", "backward"):
            waiting.setdefault(look.collective, []).append(rank)
        else:
            others.append(rank)
    if not waiting or (len(waiting) == 1 and not others):
        return ""
    clauses = [
        f"{describe_ranks(ranks)} {'is' if len(ranks) == 1 else 'are'} in {name}" for name, ranks in waiting.items()
    ]
    if others:
        clauses.append(f"{describe_ranks(others)} {'is' if len(others) == 1 else 'are'} elsewhere")
    return "; ".join(clauses)


def _stack(look: RankLook | str) -> Stack:
    if isinstance(look, str):
        return Stack(note=look)
    return Stack(tuple(look.stack.splitlines()), collective=look.collective)


def _flight(looks: Mapping[int, RankLook | str], count: int) -> str:
    flights = {rank: look.flight for rank, look in looks.items() if isinstance(look, RankLook) and look.flight}
    if not any(each.recorded for each in flights.values()):
        return "PyTorch has not recorded any collectives on these ranks"
    return flight.render(flights, count)


def _from_outside(job: FoundJob, *, names: bool) -> str:
    """Return the stacks of a job that does not answer, as py-spy sees them."""
    looks = NativeStacks()
    found: dict[int, Stack] = {}
    seen: dict[int, list[str]] = {}
    for each in job.processes:
        native = looks.look(each.pid)
        values = names_from_outside(looks, each.pid) if names and not native.obstacle else []
        obstacle = values if isinstance(values, NativeStack) else native
        if obstacle.obstacle or isinstance(values, NativeStack):
            why = _explain(obstacle.obstacle, obstacle.text)
            raise UsageError(f"job {job.name} does not answer looks, and {why}. To have it answer, {_HOW}")
        found[each.rank] = Stack(tuple(native.frames))
        seen[each.rank] = values
    parts = [f"job {job.name} does not answer looks: stacks by py-spy", stack_report.render(found)]
    return "\n\n".join([*parts, *([merged_lines(seen)] if names else [])])


def _explain(obstacle: str, text: str) -> str:
    if obstacle == "missing":
        return "py-spy, which shows stacks from outside, is not installed: `pip install py-spy`"
    if obstacle == "refused":
        return "the system does not let py-spy read it (kernel.yama.ptrace_scope)"
    return f"py-spy failed: {text}"
