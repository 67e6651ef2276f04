"""Experts of a mixture that a group of ranks divides, each rank a part of every expert (`tp`).

Independent of plans, and of which layers a model divides besides.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor, placement_types
from torch.distributed.tensor.parallel import ParallelStyle

from nbdist.errors import UsageError
from nbdist.train.experts.gathered import showing_local

STYLE = "moe_tp_experts"  # as transformers names it

# By the name that transformers gives the style of a parameter: which dimension of [expert, rows, columns] is divided,
# and into how many packed matrices that one is cut before: a gate and what it is multiplied by.
PARAMETER_STYLES: Mapping[str, tuple[int, int]] = {
    "colwise": (1, 1),
    "rowwise": (2, 1),
    "packed_colwise": (1, 2),
    "packed_rowwise": (2, 2),
}


class DividedExperts(ParallelStyle):
    """All ranks have the same tokens; each computes its part of all experts, and the parts are summed.

    Args:
        styles: Of each parameter, by its name in the module.
    """

    def __init__(self, styles: Mapping[str, str]) -> None:
        self._styles = styles

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        for name, style in self._styles.items():
            parameter = module.get_parameter(name)
            part = distribute_tensor(parameter.detach(), device_mesh, [_placement(style)], src_data_rank=None)
            module.register_parameter(name, nn.Parameter(part, parameter.requires_grad))
        module.__class__ = showing_local(type(module), tuple(self._styles))

        def take(module: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, Any]:
            shared = {name: _shared(value, device_mesh) for name, value in named.items()}
            return tuple(_shared(value, device_mesh) for value in inputs), shared

        def add_up(module: nn.Module, inputs: object, output: torch.Tensor) -> torch.Tensor:
            return DTensor.from_local(output, device_mesh, [Partial()], run_check=False).full_tensor()

        module.register_forward_pre_hook(take, with_kwargs=True)
        module.register_forward_hook(add_up)
        return module


def _placement(style: str) -> Placement:
    dimension, matrices = PARAMETER_STYLES[style]
    if matrices == 1:
        return Shard(dimension)
    strided = getattr(placement_types, "_StridedShard", None)
    if strided is None:
        raise UsageError(f"this version of torch can't divide experts whose matrices are packed ({style}): set tp to 1")
    placement: Placement = strided(dimension, split_factor=matrices)
    return placement


def _shared(value: Any, mesh: DeviceMesh) -> Any:
    """Return what all ranks have alike, so that its gradient is the sum of theirs."""
    if not isinstance(value, torch.Tensor) or not value.is_floating_point():
        return value
    return DTensor.from_local(value, mesh, [Replicate()], run_check=False).to_local(grad_placements=[Partial()])


def dimension_of(style: str, parameter: torch.Tensor) -> tuple[int, int]:
    """Return how long what is divided of a parameter is, and how many such matrices are packed in it."""
    dimension, matrices = PARAMETER_STYLES[style]
    return parameter.shape[dimension] // matrices, matrices
