"""Schedules that end too late because they were sized by a loader before it was prepared.

Knows torch's schedulers and those of transformers; of others nothing is said.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from functools import partial
from typing import Any

from torch.optim import lr_scheduler

from nbdist.train.state import State, rank


def warn_of_length(scheduler: Any, sizes: Iterable[tuple[int, int]], state: State) -> None:
    """Warn on rank 0 if a schedule ends after whole epochs of a loader as it was before it was prepared.

    Args:
        scheduler: Made before the loaders were prepared.
        sizes: The batches of each loader that is prepared with it, before and after.
        state: Whose plan says how many batches make a step.
    """
    length = steps_of(scheduler)
    if length is None or rank() != 0:
        return
    for before, after in sizes:
        taken, steps = _steps(before, state.plan.accumulate), _steps(after, state.plan.accumulate)
        whole = next((size for size in (taken, before) if size and length >= size and length % size == 0), None)
        if whole is None or steps >= taken:
            continue
        epochs = length // whole
        warnings.warn(
            f"{type(scheduler).__name__} ends after {length:,} steps, that is {epochs:,} x {whole:,}: what an epoch "
            "took before the loader was prepared. On these ranks an epoch takes "
            f"{steps:,} optimizer steps, and a scheduler steps once for each: for {epochs:,} "
            f"epoch{'s' * (epochs > 1)} make it end after {epochs * steps:,}. Take the length of the prepared loader, "
            "and prepare the scheduler after it",
            stacklevel=4,  # where the user called prepare
        )
        return


def _steps(batches: int, accumulate: int) -> int:
    return -(-batches // accumulate)


def steps_of(scheduler: Any) -> int | None:
    """Return the steps after which a schedule has come to its end; None if it has none, or none that is known."""
    if isinstance(scheduler, lr_scheduler.SequentialLR):
        parts: Any = getattr(scheduler, "_schedulers", None)
        begins: Any = getattr(scheduler, "_milestones", None)
        last = steps_of(parts[-1]) if parts and begins else None
        return None if last is None else int(begins[-1]) + last
    if isinstance(scheduler, lr_scheduler.LambdaLR):
        given = (each.keywords for each in scheduler.lr_lambdas if isinstance(each, partial))
        found = next((keywords["num_training_steps"] for keywords in given if "num_training_steps" in keywords), None)
    elif isinstance(scheduler, lr_scheduler.OneCycleLR):
        found = scheduler.total_steps
    elif isinstance(scheduler, lr_scheduler.CosineAnnealingLR):
        found = scheduler.T_max
    elif isinstance(scheduler, lr_scheduler.LinearLR):
        found = scheduler.total_iters if scheduler.end_factor < scheduler.start_factor else None  # else it warms up
    else:
        found = scheduler.total_iters if isinstance(scheduler, lr_scheduler.PolynomialLR) else None
    return int(found) if isinstance(found, int | float) else None
