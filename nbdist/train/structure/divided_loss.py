"""The loss of a language model whose layers are divided, computed where each part of the logits is.

Without it, each rank gathers the logits of the whole vocabulary, which are often the largest tensor of a step.
Independent of plans.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, loss_parallel

from nbdist.errors import UsageError
from nbdist.train.structure.language_model import has_causal_loss, is_from_transformers

_GATHERS = ("colwise_gather_output", "colwise_rep")  # the styles of a head whose logits become whole


def refuse_unfit(model: nn.Module, styles: Mapping[str, str]) -> None:
    """Refuse a model whose loss can't be computed on parts of its logits.

    Args:
        model: As its author wrote it.
        styles: The style of each module that is divided, by name.

    Raises:
        UsageError: With the reason.
    """
    if why := _why_not(model, styles):
        raise UsageError(f"loss_parallel can't divide the loss of {type(model).__name__}: {why}. Set it to False")


def _why_not(model: Any, styles: Mapping[str, str]) -> str:
    if not is_from_transformers(model):
        return "only models of transformers let nbdist replace their loss"
    if not has_causal_loss(model):
        return "it does not compute its loss by transformers' ForCausalLMLoss"
    head = model.get_output_embeddings()
    if head is None or styles.get(_name_of(model, head)) not in _GATHERS:
        return "its tp_plan does not divide the layer that computes its logits"
    return ""


def _name_of(model: nn.Module, wanted: nn.Module) -> str:
    names: dict[nn.Module, str] = {module: name for name, module in model.named_modules()}
    return names[wanted]


def divide_loss(model: Any) -> dict[str, ParallelStyle]:
    """Have a model compute its loss on this rank's part of the logits.

    In training, `logits` of what the model returns is a DTensor then. Without labels, or without gradients, they are
    whole, as the model's author has them.

    Args:
        model: Not refused, and not divided yet.

    Returns:
        How the layer that computes logits must be divided, by its name.
    """
    head, names = model.get_output_embeddings(), tuple(inspect.signature(type(model).forward).parameters)[1:]
    logits = _Logits(names)
    model.register_forward_pre_hook(logits.begin, with_kwargs=True)
    model.register_forward_hook(logits.end, always_call=True)
    model.loss_function = _Loss(model.loss_function)
    return {_name_of(model, head): _DividedLogits(logits)}


class _DividedLogits(ColwiseParallel):
    """Each rank has some of the logits, and gathers them unless a loss is to be computed."""

    def __init__(self, logits: _Logits) -> None:
        super().__init__(output_layouts=Shard(-1), use_local_output=False)
        self._logits = logits

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        divided = super()._apply(module, device_mesh)
        divided.register_forward_hook(self._logits.gather_unless_divided)  # after that which makes them a DTensor
        return divided


class _Logits:
    """Hooks of a model and its head, which keep logits divided while the model computes a loss.

    Args:
        names: Of the arguments of the model's forward.
    """

    def __init__(self, names: tuple[str, ...]) -> None:
        self._names = names
        self._are_divided = False

    def begin(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = {**dict(zip(self._names, args, strict=False)), **kwargs}
        self._are_divided = given.get("labels") is not None or given.get("shift_labels") is not None

    def gather_unless_divided(self, head: nn.Module, inputs: object, logits: Any) -> Any:
        return logits if self._are_divided else _whole(logits)

    def end(self, model: nn.Module, inputs: object, result: Any) -> Any:
        self._are_divided = False
        if torch.is_grad_enabled() or result is None:
            return result
        if isinstance(result, tuple):
            return tuple(_whole(each) for each in result)
        result.logits = _whole(result.logits)
        return result


def _whole(tensor: Any) -> Any:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


class _Loss:
    """A loss function of transformers that also takes divided logits.

    Args:
        original: The function, called as `original(logits, labels, vocab_size, ...)`.
    """

    def __init__(self, original: Callable[..., torch.Tensor]) -> None:
        self._original = original
        self.__name__ = original.__name__

    def __call__(self, logits: torch.Tensor, labels: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        if not isinstance(logits, DTensor):
            return self._original(logits, labels, *args, **kwargs)

        def loss_of(each: torch.Tensor) -> torch.Tensor:
            return _whole(self._original(each, labels, *args, **kwargs))  # type: ignore[no-any-return]

        logits = logits.float()  # as transformers does; here, so that a gradient in fp16 is one of the scaled loss
        if not (torch.is_grad_enabled() and logits.requires_grad):
            with loss_parallel():
                return loss_of(logits)
        return _LossOfParts.apply(logits, loss_of)  # type: ignore[no-any-return, no-untyped-call]


class _LossOfParts(torch.autograd.Function):
    """A loss whose gradient is computed at once: torch's `loss_parallel` would have to be on in backward as well."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, loss_of: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        leaf = logits.detach().requires_grad_()
        with torch.enable_grad(), loss_parallel():
            loss = loss_of(leaf)
            (gradient,) = torch.autograd.grad(loss, leaf)
        ctx.save_for_backward(gradient)
        return loss.detach()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        (of_logits,) = ctx.saved_tensors
        return of_logits * gradient, None
