"""Models on the meta device get storage and first values, and all ranks get those of rank 0.

Independent of plans or of sharding: it is told which modules.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from nbdist.errors import UsageError
from nbdist.train import state as training

_SHOWN = 5  # modules in a message
BUCKET = 32 << 20  # bytes that are copied together to be sent; what is larger is sent from where it is


def refuse_without_initializer(model: nn.Module) -> None:
    """Raise an error if a module on the meta device can't set its own parameters and buffers.

    Raises:
        UsageError: Some don't. The text names them.
    """
    lacking = [
        f"{name or 'the model itself'} ({type(module).__name__})"
        for name, module in model.named_modules()
        if initializer(module) is None and any(tensor.is_meta for tensor in _own(module))
    ]
    if lacking:
        more = f" and {len(lacking) - _SHOWN} more" if len(lacking) > _SHOWN else ""
        raise UsageError(
            "the model is on the meta device, and these of its modules have no reset_parameters() to set their values: "
            f"{', '.join(lacking[:_SHOWN])}{more}. Give them one, or build the model without torch.device('meta')"
        )


class Materializer:
    """Gives modules on the meta device storage and values. What is tied stays tied, also between calls.

    Args:
        device: Where tensors are to live.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._made: dict[int, torch.Tensor] = {}
        self._kept: list[torch.Tensor] = []  # so that no number of a tensor is given out twice
        self._set: set[int] = set()

    def materialize(self, modules: Iterable[nn.Module]) -> None:
        """Do so for these modules' own parameters and buffers; not for those of their children."""
        modules = list(modules)
        touched = [module for module in modules if self._give_storage(module)]
        for module in touched:
            self._give_values(module)

    def _give_storage(self, module: nn.Module) -> bool:
        found = False
        for table in (module._parameters, module._buffers):
            for name, tensor in table.items():
                if tensor is not None and tensor.is_meta:
                    table[name] = self._real(tensor)  # type: ignore[assignment]
                    found = True
        return found

    def _real(self, tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in self._made:
            fresh = torch.empty_like(tensor, device=self._device)
            if isinstance(tensor, nn.Parameter):
                fresh = nn.Parameter(fresh, requires_grad=tensor.requires_grad)
            self._made[id(tensor)] = fresh
            self._kept.append(tensor)
        return self._made[id(tensor)]

    @torch.no_grad()
    def _give_values(self, module: nn.Module) -> None:
        """Give tied weights the values that their first owner sets, as when built in the usual way."""
        known = [(tensor, tensor.clone()) for tensor in _own(module) if id(tensor) in self._set]
        initialize = initializer(module)
        if initialize is not None:
            initialize()
        for tensor, value in known:
            tensor.copy_(value)
        self._set |= {id(tensor) for tensor in _own(module)}


def _own(module: nn.Module) -> Iterator[torch.Tensor]:
    yield from module.parameters(recurse=False)
    yield from module.buffers(recurse=False)


def initializer(module: nn.Module) -> Callable[[], Any] | None:
    """Return the method by which a module sets its own parameters and buffers, if it has one."""
    for name in ("reset_parameters", "_reset_parameters"):  # torch's MultiheadAttention has the latter
        if callable(found := getattr(module, name, None)):
            return found  # type: ignore[no-any-return]
    return None


@torch.no_grad()
def take_from_rank_0(modules: Iterable[nn.Module]) -> None:
    """Give all ranks rank 0's values of whole parameters and buffers; children are not looked at.

    As bytes, which every backend can send whatever the type. Small tensors go together: a model has thousands of them.
    """
    if training.world_size() == 1:
        return
    tensors = [
        tensor.detach()
        for module in modules
        for tensor in _own(module)
        if not isinstance(tensor, DTensor) and not tensor.is_meta and tensor.numel()
    ]
    wholes = [tensor.contiguous() for tensor in tensors]
    flat = [whole.reshape(-1).view(torch.uint8) for whole in wholes]
    large = [dist.broadcast(each, src=0, async_op=True) for each in flat if each.numel() >= BUCKET]
    if small := [each for each in flat if each.numel() < BUCKET]:
        world: Any = dist.group.WORLD
        if together := getattr(dist, "_broadcast_coalesced", None):  # private, and faster
            together(world, small, BUCKET, 0)
        else:
            large += [dist.broadcast(each, src=0, async_op=True) for each in small]
    for work in large:
        work.wait()
    for whole, tensor in zip(wholes, tensors, strict=True):
        if whole is not tensor:
            tensor.copy_(whole)
