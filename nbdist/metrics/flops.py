"""How many FLOPs a model or a training step takes: counted exactly, from the operations that run.

Owns how a model or a step is run to be counted. What is counted, and how: `compute.counting`; `steps` uses it live.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from nbdist.base import trees
from nbdist.errors import UsageError
from nbdist.metrics.compute.counting import Counting, FlopCount
from nbdist.metrics.compute.formulas import register_flops

__all__ = ["FlopCount", "count", "register_flops"]


def count(step: torch.nn.Module | Callable[[], object], batch: Any = None, backward: bool = True) -> FlopCount:
    """Count the FLOPs of a model on a batch, or of a whole step.

    >>> count(model, (images,)).model_flops       # one forward and backward pass, on a copy without memory
    >>> count(model, {"input_ids": ids, "labels": ids})
    >>> count(lambda: train_step(batch))          # whatever this does, once, for real

    A model is copied to the meta device, where nothing is computed. Where that can't be (sharded models, control flow
    that depends on data) it runs in place, and gradients, buffers and random numbers are put back; ranks that share a
    model call this together then. Compiled code runs eagerly meanwhile and is as compiled as before afterwards.

    Args:
        step: The model, or a function without arguments.
        batch: Of a model: a tensor, a tuple or list of arguments, or a dict of named ones.
        backward: Whether to count the backward pass of a model too: from its `loss`, else from all that it returns.

    Returns:
        The count. Of tensor-parallel models: this rank's share.

    Raises:
        UsageError: There is nothing to run, or this torch lacks what counting needs.
    """
    if not isinstance(step, torch.nn.Module):
        if not callable(step):
            raise UsageError(f"count wants a model and a batch, or a function without arguments, not {step!r}")
        if batch is not None:
            raise UsageError(
                "count takes a batch with a model only: `count(lambda: function(batch))` for another function"
            )
        return _counted(step, "one step as it is")
    if batch is None:
        raise UsageError(f"count needs a batch for {type(step).__name__}: `count(model, batch)`")
    try:
        copied, arguments = _without_memory(step, batch)
        return _counted(lambda: _run(copied, arguments, backward), "on a meta copy")
    except UsageError:
        raise
    except Exception as error:  # not every model runs on the meta device; it is run in place then
        why = f"{type(error).__name__}: {error}".splitlines()[0][:160]
    with _left_as_it_was(step):
        return _counted(lambda: _run(step, batch, backward), f"run in place, because a meta copy can't be: {why}")


# --- running what is counted


def _counted(work: Callable[[], object], how: str) -> FlopCount:
    with Counting() as counting:
        work()
    return counting.result(how)


def _run(model: torch.nn.Module, batch: Any, backward: bool) -> None:
    out = _call(model, batch)
    if not backward:
        return
    loss = out.get("loss") if isinstance(out, Mapping) else getattr(out, "loss", None)
    results = [loss] if isinstance(loss, torch.Tensor) else trees.leaves(out)
    sums = [each.sum() for each in results if isinstance(each, torch.Tensor) and each.requires_grad]
    if not sums:
        raise UsageError(
            f"{type(model).__name__} returned nothing to differentiate: `count(model, batch, backward=False)`"
        )
    torch.autograd.backward(sums)


def _call(model: torch.nn.Module, batch: Any) -> Any:
    if isinstance(batch, Mapping):
        return model(**batch)
    return model(*batch) if isinstance(batch, (tuple, list)) else model(batch)


def _without_memory(model: torch.nn.Module, batch: Any) -> tuple[torch.nn.Module, Any]:
    """Return the model and the batch on the meta device; no tensor of the model is copied on the way."""
    bare: Any = getattr(model, "_orig_mod", model)  # of torch.compile
    if isinstance(bare, torch.nn.parallel.DistributedDataParallel):
        bare = bare.module
    memo: dict[int, Any] = {}
    for tensor in [*bare.parameters(), *bare.buffers()]:
        if hasattr(type(tensor.data), "__tensor_flatten__"):
            raise TypeError(f"it holds {type(tensor.data).__name__}s")
        twin = torch.empty_like(tensor, device="meta").requires_grad_(tensor.requires_grad)
        is_parameter = isinstance(tensor, torch.nn.Parameter)
        memo[id(tensor)] = torch.nn.Parameter(twin, tensor.requires_grad) if is_parameter else twin
    copied = copy.deepcopy(bare, memo)
    return copied, trees.mapped(lambda leaf: leaf.to("meta") if isinstance(leaf, torch.Tensor) else leaf, batch)


@contextlib.contextmanager
def _left_as_it_was(model: torch.nn.Module) -> Iterator[None]:
    """Put back afterwards what a forward and a backward pass change: gradients, buffers, random numbers."""
    gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
    buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    for parameter, _ in gradients:
        parameter.grad = None
    try:
        devices = {parameter.device.index for parameter, _ in gradients if parameter.device.type == "cuda"}
        with torch.random.fork_rng(sorted(devices)):
            yield
    finally:
        for parameter, gradient in gradients:
            parameter.grad = gradient
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)
