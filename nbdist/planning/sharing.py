"""Which ranks share a batch: those that divide layers (`tp`), sequences (`cp`), or a model into stages (`pp`).

Independent of torch, of which ranks there are, and of how batches are handed out.
"""

from __future__ import annotations

from nbdist.planning.settings import Settings


def sharers(plan: Settings, world_size: int) -> tuple[int, int]:
    """Return how many neighbors share a batch, and how many stages do; one each if the plan does not fit the ranks.

    Args:
        plan: The plan.
        world_size: The number of ranks, which may be another than the plan was made for, as after a shrink.
    """
    neighbors = plan.tp * plan.cp
    return (neighbors, plan.pp) if world_size % (neighbors * plan.pp) == 0 else (1, 1)


def batch_ranks(plan: Settings, world_size: int) -> list[list[int]]:
    """Return the ranks that share each batch. Stages are apart: their ranks are the outermost dimension of the mesh.

    Args:
        plan: As of `sharers`.
        world_size: As of `sharers`.
    """
    neighbors, stages = sharers(plan, world_size)
    stage = world_size // stages
    return [
        [rank for start in range(first, world_size, stage) for rank in range(start, start + neighbors)]
        for first in range(0, stage, neighbors)
    ]
