"""The ranks that take part in what is running, so that what all ranks must call is refused where only some can.

Whoever runs code on a part of the ranks says so here. Under torchrun and in launched functions nobody does: all take
part. Loads nothing of torch.
"""

from __future__ import annotations

from collections.abc import Sequence

from nbdist.base.ranks import describe_ranks
from nbdist.errors import UsageError

_ranks: Sequence[int] | None = None  # None: all
_alone = False
_unhurried = False


def begin(ranks: Sequence[int] | None, *, alone: bool = False) -> None:
    """Note who runs something together from now on.

    Args:
        ranks: These ranks; None for all.
        alone: Whether this rank makes calls that the others have made before: it has replaced one of them.
    """
    global _ranks, _alone, _unhurried
    _ranks, _alone, _unhurried = ranks, alone, False


def is_alone() -> bool:
    """Return whether this rank makes calls that the others have made before, and will not make again."""
    return _alone


def wait_without_limit() -> None:
    """Have ranks wait for each other for as long as it takes, until something else begins: the user debugs one."""
    global _unhurried
    _unhurried = True


def has_no_limit() -> bool:
    """Return whether ranks wait for each other for as long as it takes."""
    return _unhurried


def refuse_partial(function: str, count: int) -> None:
    """Refuse a call that other ranks would have to make, too.

    Args:
        function: What was called.
        count: The number of ranks that have to call it.

    Raises:
        UsageError: What is running runs on fewer ranks. Nothing has been done.
    """
    if _ranks is not None and len(_ranks) < count:
        raise UsageError(
            f"{function} must be called on all {count} ranks, but this cell runs on {describe_ranks(_ranks)} only: "
            "run it on all ranks (`%%distributed` without `-r`)"
        )
