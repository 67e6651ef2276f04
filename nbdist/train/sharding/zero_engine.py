"""DeepSpeed's engine in the place of a model: made around it and its optimizer, and what a loop asks of it.

The engine partitions gradients as backward makes them, and clips, scales and zeroes them itself. Loads DeepSpeed only
to make one. Independent of plans, and of how the loop counts micro-batches.
"""

from __future__ import annotations

import contextlib
import os
import sys
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from nbdist.errors import CheckpointError, UsageError


def make(model: nn.Module, optimizer: Optimizer, config: Mapping[str, Any], device: torch.device) -> DeepSpeedModel:
    """Return a model that an engine trains by this optimizer. To be called on all ranks.

    Args:
        model: With the same values on all ranks.
        optimizer: With the model's parameters. It stays the object it is; its groups get the engine's copies of them.
        config: DeepSpeed's.
        device: Where this rank computes.

    Raises:
        UsageError: DeepSpeed refuses its configuration.
    """
    deepspeed = _load(device)
    try:
        engine = deepspeed.initialize(model=model, optimizer=optimizer, config=dict(config))[0]
    except AssertionError as error:  # as DeepSpeed refuses what it does not like
        raise UsageError(f"DeepSpeed refuses this plan: {str(error).strip() or 'an assertion failed'}") from error
    _expect_step(engine, True)
    return DeepSpeedModel(engine)


class DeepSpeedModel(nn.Module):
    """A model inside an engine of DeepSpeed. What the engine has, such as `save_checkpoint`, this has as well.

    The engine's hooks would keep it and all its memory alive forever. So it ends with this, which they don't know of.

    Attributes:
        engine: Of DeepSpeed.
    """

    def __init__(self, engine: nn.Module) -> None:
        super().__init__()
        self.engine = engine
        weakref.finalize(self, _end, engine).atexit = False

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model."""
        return self.engine(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("engine"), name)


def _end(engine: Any) -> None:
    """Free what an engine holds. In stage 3 its hooks can't all be removed, so their parameters are emptied."""
    inner = engine.optimizer
    with contextlib.suppress(Exception):  # after a lost step, it may not be whole
        engine.destroy()
    for parameter in engine.module.parameters():
        if hasattr(parameter, "ds_tensor"):
            parameter.data = parameter.ds_tensor = torch.empty(0)
    vars(inner).clear()
    for name in ("optimizer", "basic_optimizer", "client_optimizer"):
        setattr(engine, name, None)


def _load(device: torch.device) -> Any:
    if device.type == "cpu" and "deepspeed" not in sys.modules:
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # else it looks for GPUs, and fails without their compiler
    import deepspeed

    if device.type == "cpu":  # its sums of CPUs would be compiled now, which takes a minute; gloo's do as well
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    return deepspeed


def engines_among(models: Iterable[nn.Module]) -> list[DeepSpeedModel]:
    """Return the models that engines train."""
    return [model for model in models if isinstance(model, DeepSpeedModel)]


def backward(models: Sequence[DeepSpeedModel], loss: torch.Tensor, **options: Any) -> None:
    """Compute gradients of a loss as it is, but for the scale of fp16.

    With several models, hooks of the engine that has computed the loss do so; fp16 needs to be told which it is, so
    DeepSpeed refuses it.
    """
    if len(models) == 1:
        models[0].engine.backward(loss, scale_wrt_gas=False, **options)  # type: ignore[operator]
    else:
        loss.backward(**options)


@contextlib.contextmanager
def gathering(model: DeepSpeedModel) -> Iterator[None]:
    """Have gradients of backwards inside go into those of the next one outside."""
    _expect_step(model.engine, False)
    try:
        yield
    finally:
        _expect_step(model.engine, True)


def _expect_step(engine: Any, expected: bool) -> None:
    engine.set_gradient_accumulation_boundary(expected)


def step(model: DeepSpeedModel) -> bool:
    """Make an optimizer step. Returns whether it was made: under fp16, one with an infinite gradient is not."""
    engine: Any = model.engine
    engine.step()
    return bool(engine.was_step_applied())


def multiply_gradients(model: DeepSpeedModel, factor: float) -> None:
    """Multiply what has been gathered for the next step. To be called on all ranks, after the last backward."""
    from deepspeed.utils import safe_get_full_grad, safe_get_local_grad, safe_set_full_grad, safe_set_local_grad

    engine: Any = model.engine
    for parameter in engine.module.parameters():
        is_partitioned = hasattr(parameter, "ds_id")
        gradient = (safe_get_local_grad if is_partitioned else safe_get_full_grad)(parameter)
        if gradient is not None:
            (safe_set_local_grad if is_partitioned else safe_set_full_grad)(parameter, gradient * factor)
    norms = getattr(engine.optimizer, "norm_for_param_grads", {})  # of gradients in CPU memory, taken in backward
    for number, norm in norms.items():
        norms[number] = norm * factor


def drop_gradients(model: DeepSpeedModel) -> None:
    """Drop what has been gathered since the last step."""
    inner: Any = model.engine.optimizer
    inner.zero_grad()
    for name in ("averaged_gradients", "all_grad_tensors"):  # private in all but name
        for number in (gathered := getattr(inner, name, {})):
            gathered[number] = None
    if hasattr(inner, "norm_for_param_grads"):
        inner.norm_for_param_grads = {}
    if not hasattr(inner, "fp32_partitioned_groups_flat"):  # stages 1 and 2; stage 3 has done it in `zero_grad`
        inner.micro_step_id = -1


@contextlib.contextmanager
def whole(model: nn.Module) -> Iterator[nn.Module]:
    """Give the model inside an engine, with whole parameters meanwhile. Any other model is given as it is."""
    if not isinstance(model, DeepSpeedModel):
        yield model
        return
    import deepspeed

    parameters = list(model.parameters())
    with deepspeed.zero.GatheredParameters(parameters, enabled=any(hasattr(each, "ds_id") for each in parameters)):
        yield unwrapped(model)


def unwrapped(model: DeepSpeedModel) -> nn.Module:
    """Return the model as the user wrote it."""
    inner: Any = model.engine.module
    return inner  # type: ignore[no-any-return]


def whole_sizes(model: DeepSpeedModel) -> list[torch.Size]:
    """Return the sizes of its parameters, also where they are partitioned."""
    return [getattr(parameter, "ds_shape", parameter.shape) for parameter in model.parameters()]


def save_engines(models: Sequence[DeepSpeedModel], folder: Path) -> None:
    """Write DeepSpeed's checkpoints of engines into a folder that there is. To be called on all ranks."""
    for number, model in enumerate(models):
        engine: Any = model.engine
        engine.save_checkpoint(str(folder), tag=f"deepspeed-{number}", save_latest=False)


def load_engines(models: Sequence[DeepSpeedModel], folder: Path) -> None:
    """Load what `save_engines` has written. To be called on all ranks.

    Raises:
        CheckpointError: DeepSpeed does not find its files.
    """
    for number, model in enumerate(models):
        engine: Any = model.engine
        found, _ = engine.load_checkpoint(str(folder), tag=f"deepspeed-{number}")
        if found is None:
            raise CheckpointError(f"{folder} lacks files of DeepSpeed's")
