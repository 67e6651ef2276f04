"""Records of the allocations of GPU memory on ranks, and files of them for https://pytorch.org/memory_viz."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from nbdist.client.ranks.rank_set import RankSet
from nbdist.errors import UsageError
from nbdist.metrics.allocation import memory_snapshot


def record(rank_set: RankSet, events: int) -> None:
    """Record allocations and frees on ranks from now on, as many on each; 0 stops recording.

    Raises:
        UsageError: No rank has a GPU.
    """
    living = rank_set.living()
    _check_gpus(rank_set, living)
    rank_set.set_up(memory_snapshot.record, events, ranks=living)


def write(rank_set: RankSet, rank: int, path: str | Path | None) -> Path:
    """Write the snapshot of a rank; None for `snapshot-rank0.pickle` in the current folder. Returns the file.

    Raises:
        UsageError: The rank has no GPU.
        RankError: This torch doesn't support it.
    """
    _check_gpus(rank_set, [rank])
    target = Path(path or f"snapshot-rank{rank}.pickle").expanduser().resolve()
    rank_set.set_up(memory_snapshot.write, target, ranks=[rank])
    return target


def _check_gpus(rank_set: RankSet, ranks: Sequence[int]) -> None:
    if ranks and all(info.device == "cpu" for info in rank_set.ranks if info.rank in ranks):
        raise UsageError(memory_snapshot.NO_GPU)
