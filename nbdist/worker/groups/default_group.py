"""The session's default process group, as programs written for torchrun meet it: they make it, and it is there already.

A script that calls `init_process_group` gets the group that the session has, if that is what it asks for. After a
script's `destroy_process_group` the session makes it again, on all ranks at the same time.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

from nbdist.errors import UsageError
from nbdist.wire.messages.rank_processes import RankSetup
from nbdist.worker.groups import join


class DefaultGroup:
    """The default process group of this rank.

    Args:
        setup: What this rank is.
        store: Gives its client of the session's rendezvous store.
    """

    def __init__(self, setup: RankSetup, store: Callable[[], Any]) -> None:
        self._setup = setup
        self._store = store
        self._ours: Callable[[], Any] = lambda: None  # a group that a script destroys must not be kept alive

    def make(self) -> str:
        """Make it for the first time, if the session is to have one, and hand it out to scripts from now on.

        Returns:
            Its backend; "none" without one.
        """
        if not self._setup.options.init:
            return "none"
        backend = "none" if self._setup.newcomer else self._join(0)  # a newcomer gets it with all other groups
        self._hand_out()
        return backend

    def renumber(self, setup: RankSetup) -> None:
        """Note that this rank is another number, of others."""
        self._setup = setup

    def adopted(self) -> None:
        """Note that this rank has got it from `Collectives.adopt`."""
        import torch.distributed as dist

        if dist.is_initialized():
            self._ours = weakref.ref(dist.group.WORLD)

    @property
    def destroyed(self) -> bool:
        """Whether there was one, and a script has destroyed it."""
        import torch.distributed as dist

        return self._setup.options.init and not dist.is_initialized()

    def make_again(self, attempt: int) -> None:
        """Make it again. All ranks do so at the same time; on those that still have one, it is of no use any more.

        Args:
            attempt: A number that no making of it has had before.
        """
        import torch.distributed as dist

        if dist.is_initialized():
            dist.destroy_process_group()
        self._join(attempt)

    def _join(self, attempt: int) -> str:
        import torch.distributed as dist

        backend = join.join(self._setup, self._store(), attempt)
        self._ours = weakref.ref(dist.group.WORLD)
        return backend

    def _hand_out(self) -> None:
        """Let `init_process_group` return as if it had made the group, where the session's is there."""
        import torch.distributed as dist
        import torch.distributed.distributed_c10d as c10d

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
            if not dist.is_initialized() or dist.group.WORLD is not self._ours():  # the script makes one of its own
                original(backend, init_method, timeout, world_size, rank, store, *args, **kwargs)
                return
            _check(backend, world_size, rank, store)
            if not reported:
                reported = True
                print("nbdist: init_process_group returns the session's process group, which was made at its start")

        dist.init_process_group = c10d.init_process_group = init_process_group


def _check(backend: str | None, world_size: int, rank: int, store: object) -> None:
    """Refuse what the session's group can't be.

    Raises:
        UsageError: The text has what was asked for, what there is, and how to start a session that can.
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
    """Return the backends in torch's notation, by device type; "" for one that is for all devices."""
    if not backends or backends == "undefined":
        return {}
    pairs = [part.rpartition(":") for part in backends.split(",")]
    return {device: name for device, _, name in pairs}


def _refusal(asked: str, have: str, other: str = "") -> str:
    return (
        f"init_process_group asks for {asked}, but the session already has a process group, with {have}. Leave that "
        f"argument out, or start ranks that make their own group: {other}`%distributed start --no-init`."
    )
