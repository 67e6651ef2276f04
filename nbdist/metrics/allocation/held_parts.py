"""What of a process's tensors is held now as parameters, gradients, optimizer's state, and as anything else.

Each storage counts once, as the first of these that it is. Calls nothing of the user's.
"""

from __future__ import annotations

import gc
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import msgspec

from nbdist.base import trees
from nbdist.metrics.allocation.tensors import Block, address_of, find, largest

KINDS = ("parameters", "buffers", "gradients", "optimizer", "other")


class HeldParts(msgspec.Struct, frozen=True):
    """What is held on one device, in bytes.

    Attributes:
        device: "cpu" or "cuda:0".
        parameters: Of modules; a rank's shard of sharded ones.
        buffers: Of modules.
        gradients: Of parameters.
        optimizer: State of optimizers.
        other: Other tensors that Python knows: batches, outputs, caches.
        unknown: In tensors that Python does not know of, for example what autograd has saved for a backward pass; None:
            torch does not count this device's memory.
        peak: The most that tensors have taken, by torch's counter; None likewise.
        largest: The largest of the others, by name.
    """

    device: str
    parameters: int = 0
    buffers: int = 0
    gradients: int = 0
    optimizer: int = 0
    other: int = 0
    unknown: int | None = None
    peak: int | None = None
    largest: list[Block] = []


def held_parts(names: Mapping[str, Any]) -> list[HeldParts]:
    """Return what is held on each device. Walks all objects: 0.1 s or more.

    Args:
        names: The user's variables, after which the largest other tensors are called.
    """
    torch = sys.modules.get("torch")
    if torch is None:
        return []
    kinds: dict[int, str] = {}
    sizes: dict[int, tuple[str, int]] = {}
    objects = gc.get_objects()
    for kind, tensors in _by_kind(torch, objects):
        for tensor in tensors:
            found = address_of(tensor)
            if found is not None and found[1].device != "meta":
                kinds.setdefault(found[0], kind)
                sizes.setdefault(found[0], (found[1].device, found[1].size))
    held: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for address, (device, size) in sizes.items():
        held[device][kinds[address]] += size
    others = [block for address, block in find(names).items() if kinds.get(address) == "other"]
    return [
        HeldParts(device, **_of_device(torch, device, held[device]), largest=largest(others, device))
        for device in sorted(held)
    ]


def _by_kind(torch: Any, objects: Iterable[Any]) -> Iterator[tuple[str, list[Any]]]:
    """Yield tensors by what they are, those first that decide."""
    modules, optimizers, tensors = [], [], []
    for one in objects:
        kind = type(one)
        if issubclass(kind, torch.nn.Module) and "_modules" in vars(one):
            modules.append(one)
        elif issubclass(kind, torch.optim.Optimizer):
            optimizers.append(one)
        elif issubclass(kind, torch.Tensor):
            tensors.append(one)
    parameters = [held for module in modules for held in module._parameters.values() if held is not None]
    yield "parameters", parameters
    yield "buffers", [held for module in modules for held in module._buffers.values() if held is not None]
    yield "gradients", [held.grad for held in parameters if held.grad is not None]
    leaves = (leaf for optimizer in optimizers for leaf in trees.leaves(dict(optimizer.state)))
    yield "optimizer", [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    yield "other", tensors


def _of_device(torch: Any, device: str, held: Counter[str]) -> dict[str, Any]:
    found: dict[str, Any] = {kind: held[kind] for kind in KINDS}
    if device.startswith("cuda") and torch.cuda.is_initialized():
        found["unknown"] = max(0, int(torch.cuda.memory_allocated(device)) - sum(held.values()))
        found["peak"] = int(torch.cuda.max_memory_allocated(device))
    return found
