"""Has the ranks of a running cell call a function together, after the same optimizer step; then the cell goes on."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

from nbdist.base import limits
from nbdist.base.ranks import describe_ranks
from nbdist.client.ranks.rank_set import RankSet
from nbdist.client.ranks.task import Task
from nbdist.errors import SessionBusy, SessionError
from nbdist.wire.questions.gathering import Arrive, CallNow, CallOff, Gather
from nbdist.wire.questions.question import NoAnswer
from nbdist.wire.questions.stopping import StepsMade

_STEPS = 3  # median steps until a rank counts as late
_SPARE = 5.0  # seconds that ranks wait for each other beyond that
_CALL = 24 * 3600.0  # seconds: a rank that can't finish is the cell's affair, which says who waits for whom


def call_after_step(rank_set: RankSet, task: Task, function: Callable[..., Any], *args: Any) -> list[Any]:
    """Call a function of nbdist's on the ranks of a cell that trains.

    Args:
        rank_set: The ranks.
        task: The cell.
        function: A function of a module.
        args: Its arguments.

    Returns:
        The values, in the order of the ranks.

    Raises:
        SessionBusy: The ranks of the cell do not make steps together, or it is ending; it goes on as it was.
        SessionError: A rank has ended, or its cell was interrupted, before the function returned there.
    """
    _meet(rank_set, task)
    call = CallNow(task.serial, pickle.dumps((function, args)))
    traffic = rank_set.traffic
    sets = rank_set.sets_started

    def wanted() -> bool:
        there = not rank_set.closed and rank_set.sets_started == sets
        return there and traffic.dead.keys().isdisjoint(task.ranks)

    called = traffic.ask(task.ranks, call, timeout=_CALL, wanted=wanted)
    if died := [rank for rank in task.ranks if rank in traffic.dead and rank not in called]:
        raise SessionError(f"{describe_ranks(died)} died meanwhile: `%distributed heal` replaces dead ranks")
    values = []
    for rank in task.ranks:
        answer = called.get(rank) or NoAnswer("its session was ended, or restarted")
        if isinstance(answer, NoAnswer):
            raise SessionError(f"rank {rank} did not finish: {answer.why}")
        values.append(pickle.loads(answer.value))
    return values


def _meet(rank_set: RankSet, task: Task) -> None:
    """Have all ranks wait after the same step.

    Raises:
        SessionBusy: They don't get there, and go on.
    """
    ask, slack = rank_set.traffic.ask, rank_set.traffic.slack
    made = ask(task.ranks, Gather(task.serial), timeout=limits.ARM)
    steps = [each for each in made.values() if isinstance(each, StepsMade) and each.running and each.age is not None]
    if len(steps) < len(task.ranks):
        ask(task.ranks, CallOff(task.serial), timeout=limits.ARM)
        raise SessionBusy("not all ranks of it make optimizer steps")
    target = max(each.count for each in steps) + 1
    needed = max((target - each.count) * (each.median or 0.0) for each in steps)
    limit = max(limits.REACH_STEP, _STEPS * needed)
    arrived = ask(task.ranks, Arrive(task.serial, target, limit + _SPARE + slack), timeout=limit)
    late = [rank for rank in task.ranks if isinstance(arrived.get(rank) or NoAnswer(""), NoAnswer)]
    if late:
        ask(task.ranks, CallOff(task.serial), timeout=limits.ARM)
        raise SessionBusy(f"{describe_ranks(late)} did not come to the end of step {target:,} within {limit:.0f} s")
