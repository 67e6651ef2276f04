"""What torch knows of process groups, and backends that take the place of others: private parts, probed when used.

Independent of what is kept of a group here, or of cells.
"""

from __future__ import annotations

import contextlib
import copy
import importlib
import sys
from collections.abc import Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from nbdist.wire.messages.healing import GroupRecipe

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Backend
    from torch.distributed import ProcessGroup, Store

_FAKE_BACKEND = "torch.testing._internal.distributed.fake_pg"  # registers it


def world() -> Any:
    """Return torch's own registry of groups; None where there is none yet."""
    c10d = sys.modules.get("torch.distributed.distributed_c10d")
    return getattr(c10d, "_world", None)


def living() -> dict[str, ProcessGroup]:
    """Return the groups that this rank is a member of, by name."""
    names: dict[ProcessGroup, str] = getattr(world(), "pg_names", {})
    return {name: group for group, name in list(names.items()) if hasattr(group, "size") and group.rank() >= 0}


def members(group: ProcessGroup) -> list[int]:
    """Return global ranks, in the order of their ranks in the group."""
    mapping = world().pg_group_ranks.get(group) or {rank: rank for rank in range(group.size())}
    return sorted(mapping, key=mapping.__getitem__)


def backends(group: object) -> dict[str, Any]:
    """Return the backends of a group that are in use, by device type."""
    import torch

    found: dict[str, Any] = {}
    get = getattr(group, "_get_backend", None)
    if get is None:
        return found
    for device in map(torch.device, getattr(group, "_device_types", [])):
        with contextlib.suppress(RuntimeError):  # one that is made at first use
            found[device.type] = get(device)
    return found


def can_be_renewed(group: object) -> bool:
    """Return whether this torch lets a group have other backends."""
    needed = ("_register_backend", "_set_group_name", "_set_group_desc")
    return bool(backends(group)) and all(callable(getattr(group, name, None)) for name in needed)


def kind_of(backend: Backend) -> str:
    """Return the name of a backend's kind: "gloo", "nccl", ..."""
    with contextlib.suppress(Exception):
        return str(backend.name()).lower()
    return type(backend).__name__.removeprefix("ProcessGroup").lower()


def entered(group: object) -> tuple[int, ...]:
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


def sequence_of(group: object, device: str) -> int:
    """Return how many collectives this rank has entered in a group; 0 if that is unknown.

    Args:
        group: The group.
        device: The type of the device whose tensors they take; "": unknown, so only of a group with one backend.
    """
    known = backends(group)
    found = {id(backend): backend for type_, backend in known.items() if device in ("", type_)}
    with contextlib.suppress(Exception):  # a backend that does not count
        if len(found) == 1:
            return int(next(iter(found.values()))._get_sequence_number_for_group())
    return 0


def recipe(name: str, group: ProcessGroup) -> GroupRecipe:
    """Return how a group is made."""
    found = backends(group)
    timeouts = [timeout for backend in found.values() if (timeout := timeout_of(backend)) is not None]
    registry = world()
    return GroupRecipe(
        members(group),
        str(getattr(group, "group_desc", "")),
        {device: kind_of(backend) for device, backend in found.items()},
        str(registry.pg_map[group][0]),
        str(registry.pg_backend_config.get(group, "")),
        max(timeouts, default=timedelta()).total_seconds(),
        default=group is registry.default_pg,
    )


def stand_in(name: str, recipe: GroupRecipe, rank: int) -> None:
    """Make a group whose backends do nothing, under the name that it has on other ranks.

    Raises:
        RuntimeError: This torch can't.
    """
    import torch.distributed as dist

    importlib.import_module(_FAKE_BACKEND)
    devices = ",".join(f"{device}:fake" for device in recipe.kinds) or "cpu:fake"
    size, store = len(recipe.members), dist.HashStore()
    if recipe.default:
        if name.isdigit() and hasattr(world(), "group_count"):  # the number of all groups that there were before
            world().group_count = int(name)
        dist.init_process_group(devices, rank=rank, world_size=size, store=store)
        group: Any = dist.group.WORLD
    else:
        group = _make_subgroup(name, recipe, rank, devices, store)
    registry = world()
    if registry.pg_names.get(group) != name:
        raise RuntimeError(f"torch named the group {registry.pg_names.get(group)!r}, and elsewhere it is {name!r}")
    registry.pg_map[group] = (recipe.backend, store)
    registry.pg_backend_config[group] = recipe.config


def unset_default() -> Any:
    """Let go of the default group, which stays a group like others.

    Returns:
        The group that it was; None if there was none.

    Raises:
        RuntimeError: This torch can't.
    """
    c10d, registry = sys.modules.get("torch.distributed.distributed_c10d"), world()
    unset = getattr(c10d, "_update_default_pg", None)
    if unset is None:
        raise RuntimeError("this version of torch can't have another default process group beside existing groups")
    before = registry.default_pg
    unset(None)
    return before


def renumber(group: object, numbers: Mapping[int, int]) -> None:
    """Note that the members of a group have other numbers among all ranks."""
    ranks = world().pg_group_ranks
    ranks[group] = {numbers[rank]: place for rank, place in ranks[group].items()}


def _make_subgroup(name: str, recipe: GroupRecipe, rank: int, devices: str, store: object) -> Any:
    make = getattr(importlib.import_module("torch.distributed.distributed_c10d"), "_new_process_group_helper", None)
    if make is None:
        raise RuntimeError("this version of torch can't create a group with a given name")
    size, members = len(recipe.members), recipe.members
    group, _ = make(
        size,
        members.index(rank),
        members,
        devices,
        store,
        group_name=name,
        timeout=timedelta(seconds=recipe.timeout),
        group_desc=recipe.description,
    )
    world().pg_group_ranks[group] = {member: place for place, member in enumerate(members)}
    return group


def rank() -> int:
    """Return this rank among all; -1 without a default group."""
    group = getattr(world(), "default_pg", None)
    return group.rank() if group is not None else -1


def with_store(group: object) -> tuple[Any, Any]:
    """Return a group with the store that further groups meet through, as torch's own maker of groups does."""
    return group, world().pg_map[group][1]


def timeout_of(backend: object) -> timedelta | None:
    """Return how long a backend waits in a collective; None if it does not say."""
    found = getattr(getattr(backend, "options", None), "_timeout", None)
    return found if isinstance(found, timedelta) else None


def set_timeout(backend: object, timeout: timedelta) -> None:
    """Have collectives that a backend starts from now on wait as long, if it can be set."""
    set_default = getattr(backend, "_set_default_timeout", None)
    if set_default is not None:
        set_default(timeout)


def make_backend(
    kind: str, old: Any, store: Store, group: ProcessGroup, limit: timedelta, timeout: timedelta | None
) -> Any:
    """Return a new backend for a group.

    Args:
        kind: "gloo" or "nccl".
        old: The backend whose place it takes; its options stay if it is of the same kind.
        store: Through which it meets its peers.
        group: The process group.
        limit: How long gloo waits for peers to come.
        timeout: How long it waits in a collective; None for torch's default.
    """
    import torch.distributed as dist

    backend: Any
    if kind == "gloo":
        backend = dist.ProcessGroupGloo(store, group.rank(), group.size(), timeout=limit)
        if timeout is not None:
            set_timeout(backend, timeout)
    elif kind == "nccl":
        backend = dist.ProcessGroupNCCL(store, group.rank(), group.size(), _nccl_options(old, timeout))
    else:
        raise RuntimeError(f"a {kind} group can't be renewed; gloo and nccl can")
    backend._set_sequence_number_for_group()  # without, the counting stops
    return backend


def _nccl_options(old: Any, timeout: timedelta | None) -> Any:
    """Return the options of a backend, for another that takes its place: its connections come from no other group's."""
    import torch.distributed as dist

    if kind_of(old) != "nccl":
        options = dist.ProcessGroupNCCL.Options()
        if timeout is not None:
            options._timeout = timeout
        return options
    options = copy.deepcopy(old.options)
    options.split_from, options.split_color = None, type(options)().split_color
    return options
