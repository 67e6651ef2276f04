"""The blocks of a model: which they are; and torch.compile for each.

Knows nothing of ranks, sharding or training loops.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch import nn

from nbdist.errors import UsageError

ShardBy = str | tuple[str, ...] | Callable[[Any], bool] | None

_SHOWN = 12  # class names in a message


def find_blocks(model: nn.Module, shard_by: ShardBy = None) -> list[nn.Module]:
    """Return the modules that are sharded, checkpointed and compiled one by one, in the model's order.

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
    """Return whether it has a forward; a ModuleList only holds others."""
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
    """Yield the children of a container; of those that are only lists of others, these."""
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


def refuse_without_blocks(model: nn.Module, blocks: Sequence[nn.Module]) -> None:
    """Refuse what works by blocks for a model that has none.

    Raises:
        UsageError: The text lists the model's classes.
    """
    if not blocks:
        raise UsageError(
            f"{type(model).__name__} has no repeated blocks, so activation checkpointing and offload have nothing to "
            f'work on: name the blocks, for example shard_by="Block" (its classes are {_classes(model)})'
        )


def compile_blocks(model: nn.Module, blocks: Sequence[nn.Module], options: Mapping[str, Any]) -> None:
    """Compile each block in place, so that its class stays; the whole model if it has no blocks.

    Args:
        model: The whole model.
        blocks: Its blocks, from `find_blocks`.
        options: As for `torch.compile`.
    """
    for block in blocks or [model]:
        block.compile(**options)
