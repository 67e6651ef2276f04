"""Parameters that are divided among ranks, and look like plain tensors to the module that computes with them."""

from __future__ import annotations

import functools
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor, Placement


def showing_local(kind: type[nn.Module], names: tuple[str, ...], gradient: Placement | None = None) -> type[nn.Module]:
    """Return a class of modules whose parameters of these names look like plain tensors while FSDP has gathered them.

    A property, not a hook: it holds when a checkpointed block is computed again, and in compiled ones.

    Args:
        kind: The class that it takes the place of.
        names: Of the parameters.
        gradient: How gradients of the parameters relate on the ranks; None: each is of this rank's part.
    """
    return _showing_local(kind, names, gradient)  # type: ignore[arg-type]


@functools.cache
def _showing_local(kind: type[nn.Module], names: tuple[str, ...], gradient: Placement | None) -> type[nn.Module]:
    placements = None if gradient is None else [gradient]

    def local(name: str) -> property:
        def read(module: nn.Module) -> Any:
            parameter: Any = module._parameters[name]
            is_gathered = isinstance(parameter, DTensor) and parameter.device_mesh.ndim == 1
            return parameter.to_local(grad_placements=placements) if is_gathered else parameter

        return property(read)

    return type(kind.__name__, (kind,), {"__module__": kind.__module__} | {name: local(name) for name in names})
