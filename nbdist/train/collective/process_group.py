"""The process groups of this rank: those that there are, and the one that a script under torchrun leaves to us.

The latter is made when it is first needed and ended with the script.
"""

from __future__ import annotations

import atexit
import gc
import multiprocessing
import os
import sys
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch.utils.data import get_worker_info

from nbdist.base.ranks import format_ranks
from nbdist.errors import UsageError
from nbdist.train.state import default_device, has_group


def ensure_group() -> None:
    """Make the process group that a launcher such as torchrun has set the variables for, if nobody has made it.

    Without it each process of a `torchrun` script would silently train alone.
    """
    needed = {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}
    if has_group() or not dist.is_available() or not needed <= os.environ.keys():
        return
    is_helper = multiprocessing.parent_process() is not None or get_worker_info() is not None
    if os.environ["WORLD_SIZE"] == "1" or is_helper:
        return
    if torch.cuda.is_available():
        torch.cuda.set_device(default_device())
    dist.init_process_group()
    atexit.register(_end_group)


def _end_group() -> None:
    """End gloo's threads before Python ends.

    One that frees a tensor while Python ends would abort the process ("terminate called without an active exception"),
    and torchrun would report a failure of a script that has done all it should.
    """
    failed = hasattr(sys, "last_type")  # the others may never join what this rank has begun
    if failed or not has_group() or torch.cuda.is_available():
        return
    gc.collect()  # models that are still there would hold the group
    dist.destroy_process_group()


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
