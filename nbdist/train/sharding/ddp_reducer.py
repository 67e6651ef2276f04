"""DDP's reducer: the layout of its buckets, and how a model gets a new one.

More than two ranks are summed in an order that depends on the layout. A new reducer lays out its buckets by the model,
and once more, in the order in which gradients have come, after its first step. Leans on private parts of torch: each is
looked for when used.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

Layout = list[list[int]]  # parameters in each bucket, numbered as the reducer has them

_ANY_ORDER = 2  # ranks, whose sums are the same in any order
_SETTLED = "_nbdist_settled"
_NEEDED = (
    "_build_params_for_reducer",
    "_build_debug_param_to_name_mapping",
    "_ddp_init_helper",
    "_comm_hooks",
    "_get_ddp_logging_data",
)


def is_built(model: object) -> bool:
    """Return whether a DDP model has a reducer: not if its making was interrupted, or if it reduces by itself."""
    return "reducer" in model.__dict__


def can_be_renewed(model: Any) -> bool:
    """Return whether this version of torch lets a model have a new reducer."""
    return all(hasattr(model, name) for name in _NEEDED)


def is_settled(model: Any) -> bool:
    """Return whether buckets are final: they are laid out once more in an early forward, or never."""
    if getattr(model, "_has_rebuilt_buckets", False) or getattr(model, _SETTLED, False):
        return True
    return bool(model.find_unused_parameters and not model.static_graph)


def note_settled(model: Any, settled: bool) -> None:
    """Note whether a model's buckets are final, where torch has forgotten it."""
    model.__dict__[_SETTLED] = settled


def layout_of(model: Any) -> Layout | None:
    """Return how a model's buckets are laid out after its first step; None before that, and where that is not known."""
    if not is_built(model) or not hasattr(model, "_get_ddp_logging_data"):
        return None
    text = str(model._get_ddp_logging_data().get("rebuilt_per_bucket_param_indices", ""))
    return [[int(number) for number in bucket.split()] for bucket in text.split(",")] if text else None


def lay_out(model: Any, layout: Layout) -> None:
    """Have a model sum its gradients from the next step on in the order of an earlier run's buckets.

    Nothing changes if the layout does not fit the model, or if this version of torch doesn't support it.
    """
    import torch.distributed as dist

    if not is_built(model) or not can_be_renewed(model) or layout_of(model) == layout:
        return
    if dist.get_world_size(model.process_group) <= _ANY_ORDER:
        return
    count = len(model._build_params_for_reducer()[0])
    if sorted(number for bucket in layout for number in bucket) != list(range(count)):
        return
    if hasattr(dist, "_compute_bucket_assignment_by_size"):
        with _as_assignment(layout, model.bucket_bytes_cap):
            renew_reducer(model)


@contextlib.contextmanager
def _as_assignment(layout: Layout, limit: int) -> Iterator[None]:
    """Have reducers that are made in the body get this layout, which they ask for the other way around."""
    import torch.distributed as dist

    found = dist._compute_bucket_assignment_by_size
    dist._compute_bucket_assignment_by_size = lambda *args, **kwargs: (layout[::-1], [limit] * len(layout))
    try:
        yield
    finally:
        dist._compute_bucket_assignment_by_size = found


def renew_reducer(model: Any) -> None:
    """Renew the reducer like `__setstate__`, but with this model's own group and hooks; a static graph is relearned.

    Ranks that were stopped around a first iteration differ in what their reducers have learned; resetting those
    would let collectives of different sizes meet.
    """
    import torch.distributed as dist

    built_in = dist.BuiltinCommHookType.__members__.get(_hook_name(model))
    model.reducer._remove_autograd_hooks()
    model.reducer = model.logger = None  # frees its buckets before there are new ones
    parameters, sparse = model._build_params_for_reducer()
    names = model._build_debug_param_to_name_mapping(parameters)
    model._ddp_init_helper(parameters, sparse, names, model.static_graph)
    model._has_rebuilt_buckets = False
    model.__dict__.pop(_SETTLED, None)
    if model.static_graph:
        model._static_graph_delay_allreduce_enqueued = False
        model.reducer._set_static_graph()
        model.logger._set_static_graph()
    if getattr(model, "mixed_precision", None) is not None:
        model.reducer._set_mixed_precision_param_dtype(model.mixed_precision.param_dtype)
    if built_in is not None:
        model._register_builtin_comm_hook(built_in)
    for hook, state in model._comm_hooks:
        dist._register_comm_hook(model.reducer, state, hook)


def _hook_name(model: Any) -> str:
    """Return the name of the communication hook: of one that is built in, torch keeps nothing else."""
    return str(model._get_ddp_logging_data().get("comm_hook", "")).rpartition(".")[2]
