"""The session's default process group, as programs written for torchrun meet it: they make it, and it is there already.

A script that calls `init_process_group` gets the group that the session has, if that is what it asks for.
"""

from __future__ import annotations

import functools
import weakref
from typing import Any

from nbdist.errors import UsageError


def hand_out() -> None:
    """Let `init_process_group`, called for the group that there is at this moment, return as if it had made it."""
    import torch.distributed as dist
    import torch.distributed.distributed_c10d as c10d

    ours = weakref.ref(dist.group.WORLD)  # a group that the script destroys must not live on
    original = c10d.init_process_group
    reported = False

    @functools.wraps(original)
    def init_process_group(
        backend: str | None = None,
        init_method: str | None = None,
        timeout: Any = None,
        world_size: int = -1,
        rank: int = -1,
        store: Any = None,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        nonlocal reported
        if (
            not dist.is_initialized() or dist.group.WORLD is not ours()
        ):  # the script has destroyed it, and makes one of its own
            original(backend, init_method, timeout, world_size, rank, store, *args, **kwargs)
            return
        _check(backend, world_size, rank, store)
        if not reported:
            reported = True
            print(
                "nbdist: init_process_group returns the session's process group, which has been there since the start"
            )

    dist.init_process_group = c10d.init_process_group = init_process_group


def _check(backend: str | None, world_size: int, rank: int, store: Any) -> None:
    """Refuse what the session's group can't be.

    Raises:
        UsageError: The text says what was asked for, what there is, and how to start a session that can.
    """
    import torch.distributed as dist

    if world_size not in (-1, None, dist.get_world_size()):
        raise UsageError(_refusal(f"world_size={world_size}", f"{dist.get_world_size()} ranks"))
    if rank not in (-1, None, dist.get_rank()):
        raise UsageError(_refusal(f"rank={rank}", f"this process as rank {dist.get_rank()}"))
    if store is not None:
        raise UsageError(_refusal("a store of its own", "the session's"))
    have = _by_device(dist.get_backend_config())
    asked = _by_device(str(backend or "").lower())
    if any(name not in (have.values() if device == "" else [have.get(device)]) for device, name in asked.items()):
        used = ", ".join(dict.fromkeys(have.values()))
        raise UsageError(_refusal(f"backend={backend!r}", used, f"`%distributed start --backend {backend}`, or "))


def _by_device(backends: str) -> dict[str, str]:
    """The backends in torch's notation, by device type; "" for one that is for all devices."""
    if not backends or backends == "undefined":
        return {}
    pairs = [part.rpartition(":") for part in backends.split(",")]
    return {device: name for device, _, name in pairs}


def _refusal(asked: str, have: str, other: str = "") -> str:
    return (
        f"init_process_group asks for {asked}, and the session's process group, which exists already, has {have}. "
        f"Leave that argument out, or start ranks that make their own group: {other}`%distributed start --no-init`."
    )
