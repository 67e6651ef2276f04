"""Which part of the data a rank trains on, by what DDP and FSDP2 say: equal batches may be dummy data.

Dummy data, or the same seed everywhere, is equal on ranks that all the same count each batch. With torch's context
parallelism ranks share a batch though DDP or FSDP2 averages their gradients: each has a part of its sequences.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Collection, Iterable, Iterator
from typing import Any

import torch

from nbdist.metrics.events import waits

# Ranks, this one among them, that have divided sequences among themselves, and the default group of then: after
# `%distributed shrink` or `grow` there is another one, in which ranks have other numbers.
_contexts: set[tuple[str, frozenset[int]]] = set()


def watch() -> None:
    """Have it known from now on among which ranks sequences are divided. To be called again once training goes on."""
    module: Any = sys.modules.get("torch.distributed.tensor.experimental._context_parallel._attention")
    original = getattr(module, "_context_parallel_buffers", None)  # private, so it is looked for: all ways lead there
    if original is None or hasattr(original, "_nbdist_watches"):
        return

    @functools.wraps(original)
    def divide(mesh: Any, *args: Any, **kwargs: Any) -> Any:
        note_divided_sequences(mesh.mesh.flatten().tolist())
        return original(mesh, *args, **kwargs)

    divide._nbdist_watches = True  # type: ignore[attr-defined]
    module._context_parallel_buffers = divide


def note_divided_sequences(ranks: Iterable[int]) -> None:
    """Note that ranks, this one among them, divide sequences among themselves."""
    _contexts.add((_default_group(), frozenset(ranks)))


Places = frozenset[tuple[int, ...]]  # of this rank, among those that average gradients


def places_of(parameters: Collection[torch.Tensor]) -> Places | None:
    """Return this rank's places among those that average the gradients of what it trains.

    Returns:
        None where nothing shows that ranks may share a batch; without a place they do if theirs are equal.
    """
    found = frozenset(_places({id(parameter) for parameter in parameters}))
    return found if found or any(map(_is_sharded, parameters)) else None


def shared_batch(batch: str, places: Collection[Places]) -> str:
    """Return what is equal on ranks that share a batch, and on no others; empty where nothing shows that they may.

    Args:
        batch: Stands for the values of the batch; empty: not known.
        places: Of all that the rank trains.
    """
    if not batch or not places:
        return ""
    joined = sorted(frozenset().union(*places))
    return f"{joined} {batch}" if joined else batch


def _is_sharded(parameter: torch.Tensor) -> bool:
    """Return whether it is a DTensor: FSDP's aside, that is tensor parallelism."""
    return hasattr(parameter, "device_mesh")


def _places(parameters: Collection[int]) -> Iterator[tuple[int, ...]]:
    """Yield this rank's place among those that average the gradients of any of these parameters, by their ids."""
    for model in waits.ddp_models():
        if any(id(parameter) in parameters for parameter in model.module.parameters()):
            yield (_place_in(model.process_group),)
    for group in _fsdp_groups():
        if any(id(each.sharded_param) in parameters for each in group.fsdp_params):
            mesh = group.mesh_info
            groups = (getattr(mesh, name, None) for name in ("replicate_process_group", "shard_process_group"))
            yield tuple(0 if group is None else _place_in(group) for group in groups)


def _place_in(group: Any) -> int:
    """Return the first place in a group of the ranks that share this rank's sequences; without others its own."""
    own: int = group.rank()
    if not _contexts:
        return own
    members, world = torch.distributed.get_process_group_ranks(group), _default_group()
    sharing = frozenset[int]().union(*(ranks for of, ranks in _contexts if of == world and members[own] in ranks))
    return min([own, *(place for place, rank in enumerate(members) if rank in sharing)])


def _default_group() -> str:
    """Return the name of the default group, which no other has had."""
    world = torch.distributed.group.WORLD
    return "" if world is None else str(world.group_name)


def _fsdp_groups() -> Iterator[Any]:
    """Yield the groups of parameters that `fully_shard` has made in this process."""
    states = getattr(sys.modules.get("torch.distributed._composable_state"), "_module_state_mapping", {})
    for reference in list(states.values()):
        yield from getattr(reference(), "_fsdp_param_groups", ())
