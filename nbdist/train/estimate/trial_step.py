"""A training step on tensors without values, as one rank makes it.

Models are made distributed by the same functions as in `prepare`, sharding among ranks that aren't there included; only
DDP is left out, which looks at values. Independent of what is measured.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.overrides import TorchFunctionMode

from nbdist.base import trees
from nbdist.errors import UsageError
from nbdist.plan import Plan
from nbdist.train import state as training
from nbdist.train.loop import averages
from nbdist.train.loop.gradients import parameters_of
from nbdist.train.prepare import strategies

CPU = torch.device("cpu")


@dataclass
class TrialSetup:
    """What the process must know before it takes the model.

    Attributes:
        plan: How the model is made distributed.
        world_size: Number of ranks.
        has_group: Whether they have a process group.
        on_gpu: Whether the step is to be made on a GPU.
        details: Whether activations by module, and FLOPs, are to be found as well; that takes two more steps.
    """

    plan: Plan
    world_size: int
    has_group: bool
    on_gpu: bool
    details: bool = False


@dataclass
class TrialTask:
    """What is done in a step; its tensors come without values.

    Attributes:
        model: The model, or a function that makes it.
        batch: What it is called with; tuples of integers are shapes.
        optimizer: An optimizer of the model's parameters, or what makes one of parameters.
        loss: Makes the loss of the model's output, or None.
    """

    model: Any
    batch: Any
    optimizer: Any
    loss: Callable[..., Any] | None


@dataclass
class Step:
    """A training step of one rank, which can be made again.

    Attributes:
        model: Distributed already.
        optimizer: Of its parameters.
        batch: One micro-batch.
        loss: As the task says.
        micro_batches: How often forward and backward are made in a step.
        exchanges_each: Whether gradients are exchanged in each of them.
        keeps_gradients: Whether gradients stay between steps.
        state: Keeps the averaged weights, if the plan has them.
        between: Called between two micro-batches.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    batch: Any
    loss: Callable[..., Any] | None
    micro_batches: int
    exchanges_each: bool
    keeps_gradients: bool
    state: training.State
    between: Callable[[], object] = field(default=lambda: None)

    def __call__(self) -> None:
        """Run the step."""
        for number in range(self.micro_batches):
            if number:
                self.between()
            if isinstance(self.model, FSDPModule):
                self.model.set_requires_gradient_sync(self.exchanges_each or number == self.micro_batches - 1)
            self.forward().backward()
        self.optimizer.step()
        averages.update(self.state, self.optimizer)

    def forward(self) -> torch.Tensor:
        """Return the loss."""
        if self.loss is None:
            return _default_loss(_called(self.model, self.batch, spread=True))
        inputs, targets = self.batch, ()
        if isinstance(self.batch, list | tuple):
            inputs, *targets = self.batch  # type: ignore[assignment]
        loss = self.loss(_called(self.model, inputs, spread=False), *targets)
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            raise UsageError(f"loss must return a tensor with one element, not {_told(loss)}")
        return loss

    def forget_gradients(self) -> None:
        """Forget the gradients, as at a step's end; DDP's buckets keep them."""
        if not self.keeps_gradients:
            self.optimizer.zero_grad()

    @property
    def gradients(self) -> list[torch.Tensor]:
        """Those that are there."""
        return [parameter.grad for parameter in self.model.parameters() if parameter.grad is not None]

    @property
    def optimizer_state(self) -> list[torch.Tensor]:
        """All tensors that the optimizer keeps."""
        return [value for value in trees.leaves(dict(self.optimizer.state)) if isinstance(value, torch.Tensor)]


def make_step(task: TrialTask, state: training.State, setting: TrialSetup) -> Step:
    """Return a step on a model that is made distributed by the state's plan.

    Raises:
        UsageError: What the task says makes no step.
    """
    model = task.model if isinstance(task.model, nn.Module) else task.model()
    if not isinstance(model, nn.Module):
        raise UsageError(f"model is a function that returned {_told(model)}: it must return a torch.nn.Module")
    _bring_here(model)
    batch = _made_real(task.batch, _shape_type(model))
    model = strategies.distribute(model.train(), state)
    plan = setting.plan
    return Step(
        model,
        _optimizer(task.optimizer, model, state, setting.on_gpu),
        batch,
        task.loss,
        micro_batches=min(plan.accumulate, 2),  # one that finds no gradients, and one that does
        exchanges_each=plan.exchange == "each",
        keeps_gradients=strategies.strategy_in_effect(plan) == "ddp" and plan.gradient_as_bucket_view,
        state=state,
    )


def _bring_here(model: nn.Module) -> None:
    """Let what is elsewhere, as on the meta device, be on the CPU. What is tied stays tied."""
    twins: dict[torch.Tensor, torch.Tensor] = {}
    for module in model.modules():
        for table in (module._parameters, module._buffers):
            for name, tensor in table.items():
                if tensor is None or tensor.device == CPU:
                    continue
                if tensor not in twins:
                    twin = torch.empty_like(tensor, device=CPU)
                    twins[tensor] = nn.Parameter(twin, tensor.requires_grad) if name in module._parameters else twin
                table[name] = twins[tensor]  # type: ignore[assignment]


def _shape_type(model: nn.Module) -> torch.dtype:
    """Return what inputs given as shapes hold: tokens, if the first layer is an embedding."""
    first = next((module for module in model.modules() if next(module.children(), None) is None), None)
    return torch.int64 if isinstance(first, nn.Embedding) else torch.float32


def _made_real(value: Any, dtype: torch.dtype) -> Any:
    """Return the same batch with tensors of this process, instead of shapes and of tensors that are elsewhere."""
    if isinstance(value, torch.Tensor):
        return value if value.device == CPU else torch.empty_like(value, device=CPU)
    if isinstance(value, tuple) and value and all(type(item) is int for item in value):
        return torch.empty(value, dtype=dtype)
    if isinstance(value, list | tuple) and not hasattr(value, "_fields"):
        return type(value)([_made_real(item, dtype) for item in value])
    if isinstance(value, Mapping):
        return {key: _made_real(item, dtype) for key, item in value.items()}
    return value


def _called(model: nn.Module, inputs: Any, spread: bool) -> Any:
    if isinstance(inputs, Mapping):
        return model(**inputs)
    return model(*inputs) if spread and isinstance(inputs, list | tuple) else model(inputs)


def _default_loss(output: Any) -> torch.Tensor:
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if isinstance(loss, torch.Tensor):
        return loss
    first = next((leaf for leaf in trees.leaves(output) if isinstance(leaf, torch.Tensor) and leaf.requires_grad), None)
    if first is None:
        raise UsageError(f"the model returned {_told(output)}, from which no loss can be made: pass loss=function")
    return first.sum()


def _optimizer(given: Any, model: nn.Module, state: training.State, on_gpu: bool) -> torch.optim.Optimizer:
    if isinstance(given, torch.optim.Optimizer):
        optimizer = given
        optimizer.state.clear()
        for group in optimizer.param_groups:
            group["params"] = [state.replaced.get(parameter, parameter) for parameter in group["params"]]
        if not {id(one) for one in parameters_of(optimizer)} & {id(one) for one in model.parameters()}:
            raise UsageError("the optimizer has no parameter of this model: pass a class: optimizer=torch.optim.SGD")
    else:
        optimizer = given(parameter for parameter in model.parameters() if parameter.requires_grad)
    if on_gpu and not isinstance(optimizer, torch.optim.Adafactor):  # which alone keeps to loops there, too
        for group in optimizer.param_groups:
            if group.get("foreach", True) is None and not group.get("fused"):
                group["foreach"] = True
    return optimizer


@contextmanager
def nothing_moves() -> Iterator[None]:
    """Let `Module.to` do nothing: all is where it belongs, and torch can't move parameters without values."""
    original = nn.Module.to
    nn.Module.to = lambda self, *args, **kwargs: self  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.to = original  # type: ignore[method-assign]


class KernelsOfGpu(TorchFunctionMode):
    """Keep what a GPU's kernels keep where the CPU's differ: dropout's mask has a byte for each element, and attention
    with dropout has no matrix of weights.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func is F.dropout:
            call = inspect.signature(F.dropout).bind(*args, **kwargs)
            call.apply_defaults()
            if call.arguments["training"] and not call.arguments["inplace"]:
                return torch.native_dropout(call.arguments["input"], call.arguments["p"], True)[0]
        elif func is F.scaled_dot_product_attention:
            args = (*args[:4], 0.0, *args[5:]) if len(args) > 4 else args
            kwargs.pop("dropout_p", None)
        return func(*args, **kwargs)


def _told(value: Any) -> str:
    return f"a tensor of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else f"a {type(value).__name__}"
