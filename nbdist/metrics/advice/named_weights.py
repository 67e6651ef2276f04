"""The weights that optimizers move, by the names of the modules that hold them. Calls nothing of the user's."""

from __future__ import annotations

import gc
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

_WRAPPERS = {"module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"}


class Weight(NamedTuple):
    """Weights of one size.

    Attributes:
        name: Of their modules, with "*" for numbers of layers: "model.blocks.*.up".
        sizes: Rows and columns, as this rank multiplies with them.
        number: How many there are.
        shard: Whether they are this rank's part of larger ones.
    """

    name: str
    sizes: tuple[int, int]
    number: int
    shard: bool


def weights(parameters: Iterable[torch.Tensor], names: Mapping[str, Any]) -> list[Weight]:
    """Return the matrices among parameters, those of equal sizes as one.

    Embeddings are left out, unless a layer multiplies with the same parameter. A sharded parameter is there in full, as
    FSDP gathers it, and as this rank's shard, with which tensor parallelism multiplies.

    Args:
        parameters: What optimizers move; empty: those of all modules, for the optimizers no longer exist.
        names: The user's variables.
    """
    wanted = {id(parameter) for parameter in parameters}
    found: defaultdict[tuple[tuple[int, int], bool], dict[int, str]] = defaultdict(dict)
    for name, module, parameter in _held_by_modules(names):
        if (wanted and id(parameter) not in wanted) or parameter.dim() < 2 or isinstance(module, nn.Embedding):
            continue
        for key in _shapes(parameter):
            found[key].setdefault(id(parameter), name)
    return [Weight(_joined(held.values()), sizes, len(held), shard) for (sizes, shard), held in found.items()]


def _joined(names: Iterable[str]) -> str:
    """Return names as one, with "*" for numbers of layers: "model.blocks.*.up, model.blocks.*.gate"."""
    return ", ".join(dict.fromkeys(re.sub(r"(?<=\.)\d+(?=\.)", "*", name) for name in names))


def _shapes(parameter: torch.Tensor) -> Iterator[tuple[tuple[int, int], bool]]:
    shape = tuple(parameter.shape)[-2:]
    yield (int(shape[0]), int(shape[1])), False
    local = getattr(parameter, "_local_tensor", None)
    if local is not None and tuple(local.shape)[-2:] != shape:
        yield (int(local.shape[-2]), int(local.shape[-1])), True


def _held_by_modules(names: Mapping[str, Any]) -> Iterator[tuple[str, nn.Module, torch.Tensor]]:
    """Yield the name of a module, the module, and a parameter that it holds. Walks all objects: 0.1 s or more."""
    modules = [found for found in gc.get_objects() if issubclass(type(found), nn.Module) and "_modules" in vars(found)]
    inner = {id(child) for module in modules for child in module._modules.values()}
    variables = {id(value): name for name, value in names.items() if not name.startswith("_")}
    for root in modules:
        if id(root) in inner and id(root) not in variables:
            continue
        for path, module in root.named_modules():
            parts = [part for part in path.split(".") if part and part not in _WRAPPERS]
            name = ".".join([variables.get(id(root), type(root).__name__), *parts])
            yield from ((name, module, parameter) for parameter in module._parameters.values() if parameter is not None)
