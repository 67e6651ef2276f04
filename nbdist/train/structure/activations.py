"""What blocks keep for backward: less of it (activation checkpointing), or in CPU memory (activation offload).

Independent of ranks, plans or of how blocks are found.
"""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from nbdist.train.structure.quantized import is_wrapper
from nbdist.train.structure.shadow import shadow

Kind = Literal["none", "full", "selective", "selective-half"]

_FLAG = "use_cache"
_READ_ONLY = "_can_checkpoint_with_cache"  # set by transformers on layers that read the cache of other layers

_PRODUCTS = {torch.ops.aten.mm.default, torch.ops.aten.addmm.default}  # those of linear layers
_EXPENSIVE = _PRODUCTS | {
    getattr(torch.ops.aten, name).default
    for name in (
        "bmm",
        "baddbmm",
        "convolution",
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_cudnn_attention",
    )
    if hasattr(torch.ops.aten, name)
}


def keep_less(
    blocks: Sequence[nn.Module], kind: Kind = "none", *, budget: float | None = None, offload: bool = False
) -> None:
    """Let blocks keep few activations on their device for backward: others are computed again, or wait in CPU memory.

    Blocks of language models run without the cache of keys and values that they are given empty. With one that holds
    earlier tokens they run as they are.

    Args:
        blocks: The blocks of one model, in its order.
        kind: "full": a block keeps its inputs only. "selective": the results of matrix products, convolutions and
            attention too, which are expensive to compute. "selective-half": the same, but of every second product of
            linear layers only.
        budget: In place of `kind`: the share of blocks that keep their activations, from 0 to less than 1, spread
            evenly; the others are computed again as under "full".
        offload: Whether what autograd saves in a block is moved to pinned CPU memory until backward. The results that
            the selective kinds keep are not saved by autograd, and stay.
    """
    kept = None if budget is None else int(budget * len(blocks))
    for number, block in enumerate(blocks):
        if kept is not None:
            is_kept = (number + 1) * kept // len(blocks) > number * kept // len(blocks)
            kind = "none" if is_kept else "full"
        if kind != "none" or offload:
            shadow(block, "forward", partial(_forward, kind, offload, CacheArguments.of(block)))


def _forward(
    kind: Kind,
    offload: bool,
    cache: CacheArguments,
    original: Callable[..., Any],
    block: nn.Module,
    /,  # a block may have arguments of these names, too
    *args: Any,
    **kwargs: Any,
) -> Any:
    if not torch.is_grad_enabled() or cache.is_filled(args, kwargs):
        return original(block, *args, **kwargs)
    args, kwargs = cache.turned_off(args, kwargs)
    run = partial(original, block)
    if kind != "none":
        options: dict[str, Any] = {"context_fn": _CONTEXTS[kind]} if kind in _CONTEXTS else {}
        run = partial(checkpoint, run, use_reentrant=False, **options)
    if not offload:
        return run(*args, **kwargs)
    with Offloaded():
        return run(*args, **kwargs)


_copies = save_on_cpu(pin_memory=True)


class Offloaded(saved_tensors_hooks):
    """What autograd saves inside of this context waits in pinned CPU memory, copied as torch's `save_on_cpu` does.

    Parameters stay where they are: `save_on_cpu` would copy them, too, though they are not freed for it.
    """

    def __init__(self) -> None:
        super().__init__(_pack, _unpack)


def _pack(tensor: torch.Tensor) -> Any:
    whole = tensor if tensor._base is None else tensor._base
    if isinstance(whole, nn.Parameter) or is_wrapper(tensor):
        return tensor.detach()
    return _copies.pack_hook(tensor)


def _unpack(packed: Any) -> torch.Tensor:
    return packed if isinstance(packed, torch.Tensor) else _copies.unpack_hook(packed)


def _save_expensive(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operation in _EXPENSIVE else CheckpointPolicy.PREFER_RECOMPUTE


def _save_every_second_product() -> Any:
    """Return contexts for one call of a block, with a count of its own."""
    counts: defaultdict[bool, int] = defaultdict(int)

    def policy(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if operation in _PRODUCTS:
            counts[context.is_recompute] += 1  # torch before 2.13 asks in backward again
            if counts[context.is_recompute] % 2 == 0:
                return CheckpointPolicy.PREFER_RECOMPUTE
        return _save_expensive(context, operation)

    return create_selective_checkpoint_contexts(policy)


_CONTEXTS: dict[str, Callable[[], Any]] = {
    "selective": partial(create_selective_checkpoint_contexts, _save_expensive),
    "selective-half": _save_every_second_product,
}


@dataclass(frozen=True)
class CacheArguments:
    """How a block takes the cache of keys and values that language models make by default.

    Training has no use for it, and a block that is computed again in backward must not get one: it is filled already
    then. Only the method by which transformers' caches give their length and the flag `use_cache` are known.

    Attributes:
        layer: The block's place in the cache.
        flag: The position of `use_cache` among the arguments, or None.
        is_writer: Whether the block writes into the cache.
    """

    layer: int
    flag: int | None
    is_writer: bool

    @classmethod
    def of(cls, block: nn.Module) -> CacheArguments:
        """Return how this block's forward takes it."""
        names = list(inspect.signature(type(block).forward).parameters)[1:]
        numbered = (getattr(part, "layer_idx", None) for part in block.modules())
        layer = next((number for number in numbered if isinstance(number, int)), 0)
        return cls(layer, names.index(_FLAG) if _FLAG in names else None, not getattr(block, _READ_ONLY, False))

    def is_filled(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Return whether the block is given keys and values of earlier tokens, on which its result depends."""
        caches = [value for value in (*args, *kwargs.values()) if _is_cache(value)]
        return self.is_writer and any(cache.get_seq_length(self.layer) for cache in caches)

    def turned_off(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the same arguments without a cache to write into."""
        if not self.is_writer:
            return args, kwargs
        kept = tuple(_off(value, place == self.flag) for place, value in enumerate(args))
        return kept, {name: _off(value, name == _FLAG) for name, value in kwargs.items()}


def _is_cache(value: Any) -> bool:
    """Return whether it works like one. The argument's name says little: it changes, and a block may mean another."""
    return callable(getattr(value, "get_seq_length", None))


def _off(value: Any, is_flag: bool) -> Any:
    if is_flag:
        return False
    return None if _is_cache(value) else value
