"""The blocks of a model, the large layers beside them, BatchNorm: which they are; and torch.compile for each block.

Independent of ranks, sharding or training loops.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from torch import nn
from torch.nn.modules import batchnorm

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


class Ends(NamedTuple):
    """The large layers of a language model that are in none of its blocks.

    Attributes:
        embeddings: What tokens go through first. Each is needed where it is called only.
        head: What makes logits: a linear layer, behind what follows the last block. Needed at once in forward and
            backward.
    """

    embeddings: list[nn.Module]
    head: list[nn.Module]


def find_ends(model: nn.Module, blocks: Sequence[nn.Module]) -> Ends:
    """Return the embedding and the head of a language model, where its structure shows that they are two.

    A head is a linear layer after the last block with an output for each row of the model's longest embedding, and a
    weight of its own. With such a layer, the embedding's weight is not needed for the logits, so the embedding is only
    ever called. Models of transformers name their input embedding themselves.

    Args:
        model: The whole model.
        blocks: Its blocks, from `find_blocks`. A model without blocks has no ends.
    """
    if not blocks:
        return Ends([], [])
    chosen = set(blocks)
    parts = list(_outermost(model, lambda module: module in chosen or _is_beside(chosen, module)))
    after = parts[1 + max(number for number, part in enumerate(parts) if part in chosen) :]
    embeddings = _longest([module for module in model.modules() if isinstance(module, nn.Embedding)])
    heads = [
        number for number, part in enumerate(after) if any(_reads_out(embeddings, each) for each in part.modules())
    ]
    head = [part for part in after[: heads[-1] + 1] if next(part.parameters(), None) is not None] if heads else []
    inside = {module for block in blocks for module in block.modules()}
    first = dict.fromkeys([*_named_embedding(model), *(embeddings if head else [])])
    return Ends([each for each in first if each not in inside], head)


def _is_beside(blocks: set[nn.Module], module: nn.Module) -> bool:
    return _computes(module) and blocks.isdisjoint(module.modules())


def _longest(embeddings: Sequence[nn.Embedding]) -> list[nn.Embedding]:
    """Return those of the vocabulary: positions and kinds of tokens are fewer."""
    rows = max((each.num_embeddings for each in embeddings), default=0)
    return [each for each in embeddings if each.num_embeddings == rows]


def _reads_out(embeddings: Sequence[nn.Embedding], module: nn.Module) -> bool:
    """Return whether a layer makes logits of the tokens that are embedded, by a weight of its own."""
    return isinstance(module, nn.Linear) and any(
        module.out_features == each.num_embeddings and module.weight is not each.weight for each in embeddings
    )


def _named_embedding(model: nn.Module) -> list[nn.Module]:
    """Return the input embedding of a model of transformers."""
    if not callable(tell := getattr(model, "get_input_embeddings", None)):
        return []
    with contextlib.suppress(NotImplementedError):  # of a model that has several, or none
        found = tell()
        return [found] if isinstance(found, nn.Module) and found is not model else []
    return []


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


def is_batch_norm(module: object) -> bool:
    """Return whether a module is a BatchNorm layer: of any number of dimensions, synchronized or not, lazy or not."""
    return isinstance(module, _BATCH_NORMS)


# Their common class is private; without it those that are built lazily are none until they are built.
_BATCH_NORMS: Any = getattr(batchnorm, "_BatchNorm", (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm))
