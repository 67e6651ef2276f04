"""Which modules keep which activations for the backward pass of a trial step, and how many FLOPs it takes."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

import torch
from torch import nn

from nbdist.metrics.compute.counting import Counting
from nbdist.train.estimate.trial_step import Step

_REST = "outside of modules"


def details_of(step: Step) -> dict[str, Any]:
    """Return what a step keeps by module, and what it computes.

    Args:
        step: Which is used up.

    Returns:
        "modules": bytes that are saved in the forward pass of one micro-batch, by the innermost module that runs then;
        "flops": of the step, None if they can't be counted here.
    """
    return {"flops": _flops(step), "modules": _saved_by_module(step)}


def _flops(step: Step) -> int | None:
    with Counting() as counting:
        step()
    step.forget_gradients()
    return None if counting.tally.uncounted else counting.tally.hardware


def _saved_by_module(step: Step) -> dict[str, int]:
    """Run a forward pass and note what autograd saves, each storage once; parameters are no activations."""
    running = [_REST]
    saved: Counter[str] = Counter()
    known = {tensor.untyped_storage()._cdata for tensor in step.model.parameters()}
    kept: list[torch.Tensor] = []  # so that no other storage gets the place of one

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        base = tensor._base if tensor._base is not None else tensor
        if storage._cdata not in known and not isinstance(base, nn.Parameter):
            known.add(storage._cdata)
            kept.append(tensor)
            saved[running[-1]] += storage.nbytes()
        return tensor

    handles = []
    for name, module in step.model.named_modules():
        label = re.sub(r"(^|(?<=\.))\d+(?=\.|$)", "*", name) or type(module).__name__
        handles.append(module.register_forward_pre_hook(lambda *_, label=label: running.append(label), prepend=True))
        handles.append(module.register_forward_hook(lambda *_: _leave(running), always_call=True))
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = step.forward()
    del loss
    for handle in handles:
        handle.remove()
    return dict(saved.most_common())


def _leave(running: list[str]) -> None:
    running.pop()
