"""Stages of a pipeline: what a rank knows of the parts of a model that are on other ranks.

Independent of how a model is cut, and of how batches pass through stages.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

_NAME = "_nbdist_stages"


class TensorForm(NamedTuple):
    """A tensor of the whole model.

    Attributes:
        shape: Its shape.
        dtype: Its type.
        stage: The first stage that has it.
    """

    shape: torch.Size
    dtype: torch.dtype
    stage: int


@dataclass
class Stages:
    """The stages that a model was cut into.

    Attributes:
        number: Which of them is this rank's.
        count: How many there are.
        group: The ranks of one pipeline, in the order of stages.
        forms: The tensors that whole models save, by name.
        size: How many numbers the parameters of the whole model are.
        tied: The weight that the first and the last stage share, if this rank has it, and there are two of them.
    """

    number: int
    count: int
    group: dist.ProcessGroup
    forms: Mapping[str, TensorForm] = field(default_factory=dict)
    size: int = 0
    tied: str = ""

    @property
    def is_first(self) -> bool:
        """Whether this rank's stage begins with words."""
        return self.number == 0

    @property
    def is_last(self) -> bool:
        """Whether this rank's stage computes the loss."""
        return self.number == self.count - 1

    def rank_of(self, stage: int) -> int:
        """Return the rank that has another stage of this rank's pipeline."""
        return dist.get_global_rank(self.group, stage)

    def elsewhere(self, own: Collection[str]) -> dict[str, torch.Tensor]:
        """Return tensors without values for those that only other stages have.

        Args:
            own: The names of this rank's.
        """
        return {
            name: torch.empty(form.shape, dtype=form.dtype, device="meta")
            for name, form in self.forms.items()
            if name not in own
        }


def mark(model: nn.Module, stages: Stages) -> None:
    """Note that this is one stage of a model."""
    setattr(model, _NAME, stages)


def stages_of(model: object) -> Stages | None:
    """Return the stages that a model was cut into; None if it is whole."""
    found = getattr(model, "__dict__", {}).get(_NAME)
    return found if isinstance(found, Stages) else None


def counted_elsewhere(models: Iterator[nn.Module] | Collection[nn.Module]) -> set[int]:
    """Return the parameters, by `id`, that the first stage has as well."""
    found = set()
    for model in models:
        stages = stages_of(model)
        if stages is not None and stages.tied and stages.is_last:
            found.add(id(tied_weight(model, stages)))
    return found


def tied_weight(model: nn.Module, stages: Stages) -> Any:
    """Return the weight that the first and the last stage share."""
    owner, _, name = stages.tied.rpartition(".")
    return getattr(model.get_submodule(owner), name)


def norm_over_stages(
    norm: torch.Tensor, norm_type: float, group: dist.ProcessGroup, device: torch.device
) -> torch.Tensor:
    """Return the norm over all stages, of each stage's own."""
    total = norm.detach().to(device, copy=True)
    if norm_type == float("inf"):
        dist.all_reduce(total, dist.ReduceOp.MAX, group=group)
        return total
    total.pow_(norm_type)
    dist.all_reduce(total, group=group)
    return total.pow_(1 / norm_type)
