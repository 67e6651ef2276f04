"""The blocks of a model: which they are, and what is done to each: activation checkpointing, torch.compile.

Knows nothing of ranks, sharding or training loops.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Literal

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from nbdist.errors import UsageError
from nbdist.train.structure.caches import CacheArguments
from nbdist.train.structure.shadow import shadow

Kind = Literal["none", "full", "selective", "selective-half"]
ShardBy = str | tuple[str, ...] | Callable[[Any], bool] | None

_SHOWN = 12  # class names in a message
_PRODUCTS = {torch.ops.aten.mm.default, torch.ops.aten.addmm.default}  # those of linear layers
_DEAR = _PRODUCTS | {
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


def find_blocks(model: nn.Module, shard_by: ShardBy = None) -> list[nn.Module]:
    """The modules that are sharded, checkpointed and compiled one by one, in the model's order.

    Without `shard_by` these are the modules whose class is repeated inside a ModuleList or Sequential, the outermost
    of them; models of transformers name their classes themselves. Never one inside another.

    Args:
        model: The whole model, which is not a block itself.
        shard_by: A class name, several, or a function that says whether a module is a block.

    Raises:
        UsageError: `shard_by` fits no module. The text lists the model's classes.
    """
    if callable(shard_by):
        found = list(_outermost(model, shard_by))
    elif shard_by:
        names = {shard_by} if isinstance(shard_by, str) else set(shard_by)
        _refuse_unknown(model, names)
        found = list(_outermost(model, lambda module: type(module).__name__ in names))
    else:
        named = set(getattr(model, "_no_split_modules", None) or ())
        found = list(_outermost(model, lambda module: type(module).__name__ in named)) or _repeated(model)
    if shard_by and not found:
        raise UsageError(f"shard_by fits no module of {type(model).__name__}, whose classes are {_classes(model)}")
    for block in found:
        if not _computes(block):
            raise UsageError(
                f"shard_by fits a {type(block).__name__}, which computes nothing itself, as it has no forward(): name "
                f"what is inside of it (the classes are {_classes(model)})"
            )
    return found


def _computes(module: nn.Module) -> bool:
    """Whether it has a forward; a ModuleList only holds others."""
    return type(module).forward is not nn.Module.forward


def _outermost(model: nn.Module, is_block: Callable[[nn.Module], bool]) -> Iterator[nn.Module]:
    return _blocks_below(model, is_block, {model})


def _blocks_below(
    module: nn.Module, is_block: Callable[[nn.Module], bool], seen: set[nn.Module]
) -> Iterator[nn.Module]:
    for child in module.children():
        if child in seen:
            continue
        seen.add(child)
        if is_block(child):
            yield child
        else:
            yield from _blocks_below(child, is_block, seen)


def _repeated(model: nn.Module) -> list[nn.Module]:
    members: set[nn.Module] = set()
    for container in model.modules():
        if isinstance(container, nn.ModuleList | nn.Sequential):
            children = [child for child in _computing(container) if next(child.parameters(), None) is not None]
            counts = Counter(type(child) for child in children)
            members |= {child for child in children if counts[type(child)] > 1}
    return list(_outermost(model, members.__contains__))


def _computing(container: nn.Module) -> Iterator[nn.Module]:
    """The children of a container; of those that are only lists of others, these."""
    for child in container.children():
        if _computes(child):
            yield child
        else:
            yield from _computing(child)


def _refuse_unknown(model: nn.Module, names: Iterable[str]) -> None:
    known = {type(module).__name__ for module in model.modules()}
    for name in names:
        if name not in known:
            raise UsageError(
                f"shard_by={name!r} names no class in {type(model).__name__}, whose classes are {_classes(model)}"
            )


def _classes(model: nn.Module) -> str:
    names = list(dict.fromkeys(type(module).__name__ for module in model.modules() if module is not model))
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more or "none"


def checkpoint_blocks(model: nn.Module, kind: Kind, shard_by: ShardBy = None) -> None:
    """Let blocks keep few activations for backward and compute the others again.

    Blocks of language models run without the cache of keys and values that they are given empty. With one that holds
    earlier tokens they are not checkpointed.

    Args:
        model: The whole model.
        kind: "full": a block keeps its inputs only. "selective": the results of matrix products, convolutions and
            attention too, which are dear to compute. "selective-half": the same, but of every second product of linear
            layers only.
        shard_by: What is a block, as with `find_blocks`.

    Raises:
        UsageError: The model has no blocks.
    """
    if kind == "none":
        return
    blocks = find_blocks(model, shard_by)
    refuse_without_blocks(model, blocks)
    for block in blocks:
        _checkpoint(block, kind)


def checkpoint_share(model: nn.Module, budget: float, shard_by: ShardBy = None) -> None:
    """Let so many blocks be checkpointed, spread evenly, that the others are this share of all at most.

    Args:
        model: The whole model.
        budget: The share of blocks that keep their activations, from 0 to less than 1.
        shard_by: What is a block, as with `find_blocks`.

    Raises:
        UsageError: The model has no blocks.
    """
    blocks = find_blocks(model, shard_by)
    refuse_without_blocks(model, blocks)
    kept = int(budget * len(blocks))
    for number, block in enumerate(blocks):
        keeps = (number + 1) * kept // len(blocks) > number * kept // len(blocks)
        if not keeps:
            _checkpoint(block, "full")


def _checkpoint(block: nn.Module, kind: Kind) -> None:
    options = {"context_fn": _CONTEXTS[kind]} if kind in _CONTEXTS else {}
    shadow(block, "forward", partial(_checkpointed, options, CacheArguments.of(block)))


def refuse_without_blocks(model: nn.Module, blocks: Sequence[nn.Module]) -> None:
    """Refuse what works by blocks for a model that has none.

    Raises:
        UsageError: The text lists the model's classes.
    """
    if not blocks:
        raise UsageError(
            f"{type(model).__name__} has no repeated blocks, so activation checkpointing has nothing to work on: "
            f'name what to checkpoint, for example shard_by="Block" (its classes are {_classes(model)})'
        )


def _checkpointed(
    options: dict[str, Any],
    cache: CacheArguments,
    original: Callable[..., Any],
    block: nn.Module,
    *args: Any,
    **kwargs: Any,
) -> Any:
    if not torch.is_grad_enabled() or cache.is_filled(args, kwargs):
        return original(block, *args, **kwargs)
    args, kwargs = cache.turned_off(args, kwargs)
    return checkpoint(partial(original, block), *args, use_reentrant=False, **options, **kwargs)


def _save_dear(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operation in _DEAR else CheckpointPolicy.PREFER_RECOMPUTE


def _save_every_second_product() -> Any:
    """Contexts for one call of a block, with a count of its own."""
    counts: defaultdict[bool, int] = defaultdict(int)

    def policy(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if operation in _PRODUCTS:
            counts[context.is_recompute] += 1  # torch before 2.13 asks in backward again
            if counts[context.is_recompute] % 2 == 0:
                return CheckpointPolicy.PREFER_RECOMPUTE
        return _save_dear(context, operation)

    return create_selective_checkpoint_contexts(policy)


_CONTEXTS: dict[str, Callable[[], Any]] = {
    "selective": partial(create_selective_checkpoint_contexts, _save_dear),
    "selective-half": _save_every_second_product,
}


def compile_blocks(model: nn.Module, options: Mapping[str, Any], shard_by: ShardBy = None) -> None:
    """Compile each block in place, so that its class stays; the whole model if it has no blocks.

    Args:
        model: The whole model.
        options: As for `torch.compile`.
        shard_by: What is a block, as with `find_blocks`.
    """
    for block in find_blocks(model, shard_by) or [model]:
        block.compile(**options)
