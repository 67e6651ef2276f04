"""Precisions: autocast around forwards, FSDP's policy, the scaler of fp16.

Independent of strategies, optimizers or loops.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from nbdist.errors import UsageError
from nbdist.plan import Plan
from nbdist.train import state as training
from nbdist.train.structure.shadow import shadow

_TYPES = {"no": None, "fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.bfloat16}
_LAUNCHERS_VARIABLE = "ACCELERATE_MIXED_PRECISION"  # which Accelerate's launchers set, and notebook_launcher


def autocast(*, enabled: bool = True) -> AbstractContextManager[Any]:
    """Compute in the plan's precision inside this context, as with a loss outside of the prepared model.

    Before anything is prepared, and where there is no plan, the precision is that of ACCELERATE_MIXED_PRECISION in the
    environment ("no", "fp16", "bf16" or "fp8"), which launchers set.

    Args:
        enabled: False: compute in full precision inside of a context that does not.

    Raises:
        UsageError: The environment names another precision.
    """
    precision, device = _current_precision()
    dtype = _TYPES[precision]
    if dtype is None:
        return nullcontext()
    return torch.autocast(device.type, dtype, enabled=enabled)


def _current_precision() -> tuple[str, torch.device]:
    if training.is_begun() or "NBDIST_PLAN" in os.environ or _LAUNCHERS_VARIABLE not in os.environ:
        state = training.current()
        return state.plan.precision, state.device
    precision = os.environ[_LAUNCHERS_VARIABLE]
    if precision not in _TYPES:
        raise UsageError(f"{_LAUNCHERS_VARIABLE}={precision} is not a precision: allowed are no, bf16, fp16 and fp8")
    return precision, training.default_device()


def autocast_forward(model: nn.Module, plan: Plan, device: torch.device) -> None:
    """Let a model's forward compute in the plan's precision and return float32."""
    dtype = _TYPES[plan.precision]
    if dtype is None:
        return
    kind = device.type

    def forward(original: Callable[..., Any], module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
        with torch.autocast(kind, dtype):
            result = original(module, *args, **kwargs)
        return in_float32(result)

    shadow(model, "forward", forward)


def half_forward(model: nn.Module, plan: Plan) -> None:
    """Let a model whose parameters will have half the bits take inputs of any float type, and return float32."""
    dtype = _TYPES[plan.precision]
    if dtype is None:
        return

    def forward(original: Callable[..., Any], module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
        return in_float32(original(module, *_cast(args, dtype), **_cast(kwargs, dtype)))

    shadow(model, "forward", forward)


def _cast(inputs: Any, dtype: torch.dtype) -> Any:
    """Return the same arguments, with tensors of float types in another one."""

    def cast(leaf: Any) -> Any:
        return leaf.to(dtype) if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() else leaf

    return torch.utils._pytree.tree_map(cast, inputs)


def in_float32(result: Any) -> Any:
    """Return the same lists, tuples and dicts, with half-precision tensors in float32."""
    if isinstance(result, torch.Tensor):
        return result.float() if result.dtype in (torch.float16, torch.bfloat16) else result
    if isinstance(result, tuple) and hasattr(result, "_fields"):
        return type(result)(*map(in_float32, result))
    if isinstance(result, list | tuple):
        return type(result)(map(in_float32, result))
    if isinstance(result, Mapping):
        return type(result)({key: in_float32(value) for key, value in result.items()})  # type: ignore[call-arg]
    return result


def warn_of_emulation(plan: Plan, device: torch.device) -> None:
    """Say on rank 0 that its GPU has no hardware for bfloat16."""
    if plan.precision != "bf16" or device.type != "cuda" or training.rank() != 0:
        return
    if torch.cuda.is_bf16_supported(including_emulation=False):
        return
    warnings.warn(
        f"{torch.cuda.get_device_name(device)} only emulates bfloat16, which is slower than float32 and saves no time: "
        "plan precision='fp16', which it has hardware for",
        stacklevel=3,  # where the user called prepare
    )


def fsdp_policies(plan: Plan) -> tuple[Any, Any]:
    """Return FSDP's mixed precision for blocks and for the outermost module, which also returns float32.

    Gradients are reduced in float32: sums over many ranks lose too much in half precision.
    """
    from torch.distributed.fsdp import MixedPrecisionPolicy

    dtype = _TYPES[plan.precision]
    if dtype is None:
        return MixedPrecisionPolicy(), MixedPrecisionPolicy()
    block = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    root = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, output_dtype=torch.float32)
    return block, root


def full_precision_policy() -> Any:
    """Return FSDP's policy for layers whose parameters stay as they are, whatever type their inputs have."""
    from torch.distributed.fsdp import MixedPrecisionPolicy

    return MixedPrecisionPolicy(reduce_dtype=torch.float32, cast_forward_inputs=False)


def make_scaler(plan: Plan, device: torch.device) -> torch.amp.GradScaler | None:
    """Return the scaler that fp16 needs; None for other precisions.

    It is right under FSDP as well: with sharded gradients torch agrees over ranks on whether one is infinite.
    """
    return torch.amp.GradScaler(device.type) if plan.precision == "fp16" else None


def scaled(state: training.State, loss: torch.Tensor) -> torch.Tensor:
    """Return the loss as backward is to see it."""
    if state.scaler is None:
        return loss
    if any(record.phase == "stepped" for record in state.records.values()):
        renew_scale(state)
    state.loss_scaled = True
    return state.scaler.scale(loss)  # type: ignore[no-any-return]


def unscale(state: training.State, optimizer: torch.optim.Optimizer) -> None:
    """Bring an optimizer's gradients back to those of the loss, once a step.

    Raises:
        UsageError: No loss was scaled since the last step: dividing these gradients by the scale would leave nothing.
    """
    record = state.records[optimizer]
    if state.scaler is None or record.phase != "scaled":
        return
    if not state.loss_scaled:
        raise UsageError(
            "fp16 needs a scaled loss, but none was seen since the last step: call nbdist.backward(loss) instead of "
            "loss.backward()"
        )
    state.scaler.unscale_(optimizer)
    record.phase = "unscaled"


def scaled_step(
    state: training.State, optimizer: torch.optim.Optimizer, step: Callable[[torch.optim.Optimizer], Any]
) -> bool:
    """Make a step unless a gradient is not a number.

    Args:
        state: The training.
        optimizer: Its step is shadowed by what calls this.
        step: Makes the real step.

    Returns:
        Whether the step was made.
    """
    record = state.records[optimizer]
    unscale(state, optimizer)
    made = False

    def real_step() -> None:
        nonlocal made
        made = True
        step(optimizer)

    record.inside = real_step
    try:
        state.scaler.step(optimizer)
    finally:
        record.inside = None
    record.phase = "stepped"
    infinite = getattr(state.scaler, "_found_inf_per_device", None)  # private: without it, it is taken as made
    if getattr(optimizer, "_step_supports_amp_scaling", False) and infinite is not None:  # a fused one skips it itself
        made = made and not any(found.item() for found in infinite(optimizer).values())
    if len(state.optimizers) == 1:
        renew_scale(state)
    if not made:
        _note_skipped(state)
    return made


def renew_scale(state: training.State) -> None:
    """Let the scaler choose its next scale.

    With several optimizers only once the next backward begins: until then some have gradients of the old scale.
    """
    state.scaler.update()
    state.loss_scaled = False
    for record in state.records.values():
        record.phase = "scaled"


def forget_unscaled(state: training.State) -> None:
    """Let gradients be unscaled again after a step that was given up. The scale stays."""
    if state.scaler is not None and any(record.phase != "scaled" for record in state.records.values()):
        state.scaler.update(state.scaler.get_scale())


def _note_skipped(state: training.State) -> None:
    """Count it, and say so: of the first, and when there are ten times as many as was said."""
    state.skipped_steps += 1
    count = state.skipped_steps
    if training.rank() != 0 or str(count).strip("0") != "1":
        return
    if count == 1:
        text = (
            "fp16: an optimizer step was skipped, because a gradient was inf or NaN. That is usual in the first "
            "steps, until the scale of the loss is found; `nbdist.train.state.current().skipped_steps` counts them"
        )
    else:
        text = (
            f"fp16: {count:,} optimizer steps were skipped, besides {state.steps:,} that were made, because a gradient "
            "was inf or NaN. If that continues, look at the loss, or plan precision bf16"
        )
    warnings.warn(text, RuntimeWarning, stacklevel=5)  # where the user called optimizer.step()
