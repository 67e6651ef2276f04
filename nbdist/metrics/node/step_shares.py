"""Why a step takes as long as it does: what each rank's step consists of, and which rank the others wait for.

Works on what ranks have measured; nothing is measured here. All ranks of a synchronous loop take part in the same
collectives, so the least time that a rank spends in them is the transfer, and what others spend beyond that is waiting.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from typing import NamedTuple

from nbdist.base.text import duration, percent
from nbdist.metrics.node.sample import EVALUATING, StepSample

LATE = 1.1  # times the median rank's work, from which on the others wait for a rank
_WORTH_A_WORD = 0.01  # share of a step


class Parts(NamedTuple):
    """What a rank's step consists of, in seconds; None: not known, and part of `work`.

    Attributes:
        step: All of it.
        work: Computing, and what the processor does between.
        evaluation: Evaluations between steps.
        data: Waiting for a DataLoader.
        transfer: Collectives, without waiting for other ranks.
        others: Waiting for other ranks in collectives.
    """

    step: float
    work: float
    evaluation: float
    data: float | None
    transfer: float | None
    others: float | None


def parts_of(steps: Mapping[int, StepSample]) -> dict[int, Parts]:
    """Return what the step of each rank consists of; ranks without timed steps are left out."""
    seconds = {rank: step.seconds for rank, step in steps.items() if step.seconds and math.isfinite(step.seconds)}
    collectives = {rank: _collectives(steps[rank], seconds[rank]) for rank in seconds}
    known = [each for each in collectives.values() if each is not None]
    transfer = min(known) if len(known) == len(seconds) and known else None
    found = {}
    for rank, whole in seconds.items():
        data, within = _of(steps[rank].waiting, whole), collectives[rank]
        evaluation = _of(steps[rank].evaluation, whole) or 0.0
        others = None if transfer is None or within is None else within - transfer
        work = max(0.0, whole - evaluation - (data or 0.0) - (within or 0.0))
        found[rank] = Parts(whole, work, evaluation, data, transfer, others)
    return found


def late_rank(parts: Mapping[int, Parts]) -> int | None:
    """Return the rank that the others wait for; None: nobody waits, or it is not known."""
    if len(parts) < 2 or any(each.others is None for each in parts.values()):
        return None
    # Waiting for data and evaluating make others wait as well.
    busy = {rank: each.work + each.evaluation + (each.data or 0.0) for rank, each in parts.items()}
    latest = max(busy, key=lambda rank: busy[rank])
    return latest if busy[latest] > LATE * statistics.median_low(busy.values()) else None


def sentence(steps: Mapping[int, StepSample]) -> str:
    """Return why a step takes as long as it does, in one sentence; empty where there is nothing to say but work."""
    parts = parts_of(steps)
    late = late_rank(parts)
    is_known = any(each.data is not None or each.others is not None for each in parts.values())
    if not (is_known or any(share.evaluation >= EVALUATING for share in steps.values())):
        return ""
    waiting = [each for rank, each in parts.items() if rank != late]
    step = statistics.fmean(each.step for each in waiting)
    shares = {
        _waiting_for(late, parts): _mean([each.others for each in waiting]) / step,
        "work": _mean([each.work for each in waiting]) / step,
        "evaluation": _mean([each.evaluation for each in waiting]) / step,
        "waiting for data": _mean([each.data for each in waiting]) / step,
        "collectives": _mean([each.transfer for each in waiting]) / step,
    }
    ordered = sorted(shares.items(), key=lambda item: -item[1])
    words = ", ".join(f"{percent(share)} {name}" for name, share in ordered if share >= _WORTH_A_WORD)
    return f"step {duration(step)}: {words}"


def _waiting_for(late: int | None, parts: Mapping[int, Parts]) -> str:
    if late is None:
        return "waiting for each other"
    others = statistics.fmean(each.work for rank, each in parts.items() if rank != late)
    causes = {
        "it works": parts[late].work,
        "it waits for data, and works": parts[late].data or 0.0,
        "it evaluates, and works": parts[late].evaluation,
    }
    cause = max(causes, key=lambda words: causes[words])
    return f"waiting for rank {late} ({cause} {duration(parts[late].work)}, the others {duration(others)})"


def _collectives(step: StepSample, whole: float) -> float | None:
    """Return the seconds in collectives: what is sampled takes no more than is left beside what is measured."""
    left = 1.0 - step.evaluation - (step.waiting or 0.0)
    return None if step.communication is None else _of(min(step.communication, left), whole)


def _of(share: float | None, whole: float) -> float | None:
    return None if share is None or not math.isfinite(share) else min(1.0, max(0.0, share)) * whole


def _mean(amounts: list[float | None]) -> float:
    return statistics.fmean(amount or 0.0 for amount in amounts) if amounts else 0.0
