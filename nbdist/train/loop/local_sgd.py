"""Local SGD: ranks step alone, and their parameters are averaged every few steps.

Independent of loops or optimizers.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from nbdist.base.checks import is_whole
from nbdist.errors import UsageError
from nbdist.train import state as training


class LocalSGD:
    """Average parameters every `local_sgd_steps` optimizer steps instead of gradients in each.

    >>> with nbdist.LocalSGD(model, local_sgd_steps=8) as local_sgd:
    ...     for batch in loader:
    ...         ...
    ...         optimizer.step()
    ...         local_sgd.step()

    On leaving they are averaged once more, so that all ranks hold the same model.

    Args:
        model: A model under DDP. Any in one process.
        local_sgd_steps: Optimizer steps from one average to the next, at least 1.
        enabled: False: does nothing, and the model trains as ever.

    Raises:
        UsageError: The model is sharded, or the number is none.
    """

    def __init__(self, model: nn.Module, local_sgd_steps: int, enabled: bool = True) -> None:
        if not is_whole(local_sgd_steps, 1):
            raise UsageError(f"local_sgd_steps={local_sgd_steps!r} must be an integer of 1 or more, for example 8")
        if any(isinstance(parameter, DTensor) for parameter in model.parameters()):
            raise UsageError("local SGD needs a whole model on each rank, but this one is sharded: use strategy ddp")
        self.enabled = enabled and training.world_size() > 1
        self.num_steps = 0
        self._every = local_sgd_steps
        self._model = model
        self._alone = ExitStack()

    def __enter__(self) -> LocalSGD:
        if self.enabled and isinstance(self._model, DistributedDataParallel):
            self._alone.enter_context(self._model.no_sync())
        return self

    def __exit__(self, kind: Any, *_: object) -> None:
        self._alone.close()
        if self.enabled and kind is None:  # a rank that failed must not wait for the others
            average_parameters(self._model)

    def step(self) -> None:
        """Call this after each optimizer step. Does nothing inside an accumulation window."""
        if not training.current().sync_gradients:
            return
        self.num_steps += 1
        if self.enabled and self.num_steps % self._every == 0:
            average_parameters(self._model)


@torch.no_grad()
def average_parameters(model: nn.Module) -> None:
    """Let all ranks hold the mean of a model's parameters. To be called on all ranks."""
    ranks = training.world_size()
    parameters = [parameter.detach() for parameter in model.parameters() if parameter.requires_grad and ranks > 1]
    pending = [dist.all_reduce(parameter, async_op=True) for parameter in parameters]
    for work, parameter in zip(pending, parameters, strict=True):
        work.wait()
        parameter.div_(ranks)


def train_alone(model: nn.Module) -> None:
    """Let a model under DDP never exchange gradients: the plan's local SGD averages its parameters."""
    if isinstance(model, DistributedDataParallel):
        model.require_backward_grad_sync = False
