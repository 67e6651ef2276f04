"""What torch knows of process groups, and backends that take the place of others: private parts, probed when used.

Knows nothing of what is kept of a group here, or of cells.
"""

from __future__ import annotations

import contextlib
import copy
import sys
from datetime import timedelta
from typing import Any


def world() -> Any:
    """Return torch's own registry of groups; None where there is none yet."""
    c10d = sys.modules.get("torch.distributed.distributed_c10d")
    return getattr(c10d, "_world", None)


def living() -> dict[str, Any]:
    """Return the groups that this rank is a member of, by name."""
    names: dict[Any, str] = getattr(world(), "pg_names", {})
    return {name: group for group, name in list(names.items()) if hasattr(group, "size") and group.rank() >= 0}


def members(group: Any) -> list[int]:
    """Return global ranks, in the order of their ranks in the group."""
    mapping = world().pg_group_ranks.get(group) or {rank: rank for rank in range(group.size())}
    return sorted(mapping, key=mapping.__getitem__)


def backends(group: Any) -> dict[str, Any]:
    """Return the backends of a group that are in use, by device type."""
    import torch

    found = {}
    for device in getattr(group, "_device_types", []):
        with contextlib.suppress(RuntimeError):  # one that is made at first use
            found[str(torch.device(device).type)] = group._get_backend(torch.device(device))
    return found


def kind_of(backend: Any) -> str:
    """Return the name of a backend's kind: "gloo", "nccl", ..."""
    with contextlib.suppress(Exception):
        return str(backend.name()).lower()
    return type(backend).__name__.removeprefix("ProcessGroup").lower()


def entered(group: Any) -> tuple[int, ...]:
    """Return collectives and messages that this rank has entered in a group, by backend.

    The group's own number is that of its first backend, which may have been replaced.
    """
    numbers = []
    seen: list[Any] = []
    for backend in backends(group).values():
        if not any(backend is known for known in seen):
            seen.append(backend)
            with contextlib.suppress(Exception):  # a backend that does not count
                numbers.append(int(backend._get_sequence_number_for_group()))
    return tuple(numbers)


def make_backend(old: Any, store: Any, group: Any, limit: timedelta) -> Any:
    """Return a backend like another, that meets its peers through this store: those of gloo within the limit."""
    import torch.distributed as dist

    kind = kind_of(old)
    backend: Any
    timeout = getattr(getattr(old, "options", None), "_timeout", None)
    if kind == "gloo":
        backend = dist.ProcessGroupGloo(store, group.rank(), group.size(), timeout=limit)
        if timeout is not None:
            backend._set_default_timeout(timeout)
    elif kind == "nccl":
        backend = dist.ProcessGroupNCCL(store, group.rank(), group.size(), _nccl_options(old))
    else:
        raise RuntimeError(f"a {kind} group can't be renewed; gloo and nccl can")
    backend._set_sequence_number_for_group()  # without, the counting stops
    return backend


def _nccl_options(old: Any) -> Any:
    """Return the options of a backend, for another that takes its place: its connections come from no other group's."""
    options = copy.deepcopy(old.options)
    options.split_from, options.split_color = None, type(options)().split_color
    return options
