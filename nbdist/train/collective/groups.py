"""Process groups of this rank, found by who is in them: for a rank that has no handle of one that exists."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from nbdist.base.ranks import format_ranks
from nbdist.errors import UsageError
from nbdist.train.state import has_group


def group(which: str | Sequence[int]) -> dist.ProcessGroup:
    """Return a process group that this rank is in: for a rank that has replaced another and has no handle of it.

    >>> pair = nbdist.group([0, 1])

    Args:
        which: Its ranks in their order, or its name or description (`group.group_name`, `group.group_desc`). Of several
            with the same ranks the one that was made first.

    Raises:
        UsageError: There is none. The text lists those that there are.
    """
    groups = _groups()
    found: dist.ProcessGroup
    for name, found in groups.items():
        if which in (name, found.group_desc) or (not isinstance(which, str) and list(which) == _members(found)):
            return found
    known = [f"{format_ranks(_members(found))} ({found.group_desc or name})" for name, found in groups.items()]
    raise UsageError(f"this rank is in no process group {which!r}. It is in {'; '.join(known) or 'none'}")


def _groups() -> dict[str, Any]:
    world = getattr(c10d, "_world", None) if has_group() else None
    names = {str(name): group for group, name in getattr(world, "pg_names", {}).items()}
    in_order = sorted(names, key=lambda name: (not name.isdigit(), len(name), name))
    return {name: names[name] for name in in_order if names[name].rank() >= 0}


def _members(group: Any) -> list[int]:
    return dist.get_process_group_ranks(group)
