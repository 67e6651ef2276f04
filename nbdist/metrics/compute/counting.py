"""Counts the FLOPs of the operations that run: the dispatch mode that sees them, and what it has seen.

Knows nothing of models, steps or time. Model FLOPs are what the mathematics needs; hardware FLOPs add what is computed
again: checkpointed blocks, and the scores that fused attention does not keep. Formulas and conventions: `formulas`.
"""

from __future__ import annotations

import functools
import os
import weakref
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from nbdist.errors import UsageError
from nbdist.metrics.compute import passes
from nbdist.metrics.compute.formulas import Work, is_heavy, is_light, work_of

_SHOWN = 12  # operations


@dataclass(frozen=True)
class FlopCount:
    """What was counted. A multiply-add is 2 FLOPs; attention is counted whole, also where a mask is causal.

    Attributes:
        model_flops: FLOPs that the mathematics needs, without recomputation.
        hardware_flops: FLOPs that were carried out: with recomputation, and with products inside the optimizer.
        per_op: Hardware FLOPs by operation, the largest first.
        per_dtype: Hardware FLOPs by the dtype of what is multiplied.
        uncounted: Calls of operations that do work for which there is no formula; `register_flops` adds one.
        how: What was run for it, in words.
        tokens: Indices that were looked up in the embedding that was asked for most; 0: in none.
    """

    model_flops: int
    hardware_flops: int
    per_op: Mapping[str, int] = field(default_factory=dict)
    per_dtype: Mapping[str, int] = field(default_factory=dict)
    uncounted: Mapping[str, int] = field(default_factory=dict)
    how: str = ""
    tokens: int = 0

    def __str__(self) -> str:
        lines = [f"model     {self.model_flops:>22,} FLOPs", f"hardware  {self.hardware_flops:>22,} FLOPs ({self.how})"]
        shown = list(self.per_op.items())[:_SHOWN]
        width = max((len(name) for name, _ in shown), default=0)
        lines += [f"  {name:<{width}}  {flops:>22,}" for name, flops in shown]
        if self.uncounted:
            calls = ", ".join(f"{name} ({calls} calls)" for name, calls in self.uncounted.items())
            lines.append(f"not counted: {calls}; register_flops(name, formula) adds a formula")
        return "\n".join(lines)


class Counting:
    """Counts what runs in the thread in which it was entered, and in the backward passes that start there.

    As a context manager, or with `enter` and `leave` around a part that is no block. Compiled code runs eagerly inside:
    otherwise a dispatch mode would switch it off for good (https://github.com/pytorch/pytorch/issues/140909).

    Attributes:
        without_autograd: FLOPs outside of backward passes and of optimizers that nothing is differentiated through.
        in_optimizer: Set while an optimizer steps: products without autograd are its own then.
        device: Where the last product ran.

    Raises:
        UsageError: This torch lacks what counting needs.
    """

    def __init__(self) -> None:
        if not hasattr(torch._C, "_current_graph_task_id"):
            raise UsageError(
                f"PyTorch {torch.__version__} can't tell backward passes from forward ones: use another version"
            )
        self.without_autograd = 0
        self.in_optimizer = False
        self.device: torch.device | None = None
        self._model = self._hardware = 0
        self._tokens: Counter[tuple[int, ...]] = Counter()  # by the embedding's shape: some are of positions or types
        self._per_op: Counter[str] = Counter()
        self._per_dtype: Counter[str] = Counter()
        self._uncounted: Counter[str] = Counter()
        self._mode: Any = _Mode(self._note)
        self._stance: Any = None
        self._stop_listening: Callable[[], None] | None = None

    def __enter__(self) -> Counting:
        self.enter()
        return self

    def __exit__(self, *_: object) -> None:
        self.leave()

    def enter(self) -> None:
        """Count from here on."""
        self._stop_listening = passes.listen(_ignore)  # so that differentiable passes are known
        self._stance = torch.compiler.set_stance("force_eager")
        self._mode.__enter__()
        _under_way.add(self)

    def leave(self) -> bool:
        """Count no longer.

        Returns:
            Whether it could be left: not while a mode that was entered later is still active.
        """
        stack = [torch._C._get_dispatch_stack_at(at) for at in range(torch._C._len_torch_dispatch_stack())]
        if self._mode in stack[:-1]:
            return False
        _under_way.discard(self)
        if self._mode in stack:
            self._mode.__exit__(None, None, None)
        if self._stance is not None:
            self._stance.__exit__(None, None, None)
            self._stance = None
        if self._stop_listening is not None:
            self._stop_listening()
            self._stop_listening = None
        return True

    def result(self, how: str) -> FlopCount:
        """Return what has been counted so far."""
        return FlopCount(
            model_flops=self._model,
            hardware_flops=self._hardware,
            per_op=dict(self._per_op.most_common()),
            per_dtype=dict(self._per_dtype.most_common()),
            uncounted=dict(self._uncounted.most_common()),
            how=how,
            tokens=max(self._tokens.values(), default=0),
        )

    def _note(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        if is_light(func):
            if func is torch.ops.aten.embedding.default:
                self._add_tokens(*args[:2])
            return
        try:
            work = work_of(func, args, kwargs, out)
        except Exception as error:  # of a formula; the user's step goes on
            self._uncounted[f"{_name(func)} ({type(error).__name__}: {error})"] += 1
            return
        if work is not None:
            self._add(_name(func), _operand(args), work)
        elif is_heavy(func):
            self._uncounted[_name(func)] += 1

    def _add_tokens(self, embedding: torch.Tensor, indices: torch.Tensor) -> None:
        is_recomputed = torch._C._current_graph_task_id() != -1
        if indices.dim() > 1 and not is_recomputed:  # one-dimensional ones are of positions
            self._tokens[tuple(embedding.shape)] += indices.numel()

    def _add(self, name: str, operand: torch.Tensor | None, work: Work) -> None:
        whole = work.model + work.repeated
        dtype = "unknown"
        if operand is not None:
            dtype, self.device = str(operand.dtype).removeprefix("torch."), operand.device
        self._hardware += whole
        self._per_op[name] += whole
        self._per_dtype[dtype] += whole
        in_backward = torch._C._current_graph_task_id() != -1
        if in_backward and torch.is_grad_enabled() and not passes.differentiable():
            return  # a recomputation: it is a forward pass, within a backward one
        if not in_backward and not torch.is_grad_enabled():
            if self.in_optimizer:
                return
            self.without_autograd += work.model
        self._model += work.model


_under_way: weakref.WeakSet[Counting] = weakref.WeakSet()


def _leave_all() -> None:
    """Stop counting in a process forked while its parent counts, such as a DataLoader's worker."""
    for counting in list(_under_way):
        counting.leave()


os.register_at_fork(after_in_child=_leave_all)


class _Mode(TorchDispatchMode):
    """Tells of each operation that has run on plain tensors."""

    supports_higher_order_operators = True

    def __init__(self, note: Callable[[Any, Any, Any, Any], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._note = note

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if types and any(map(_dispatches_itself, types)):
            return NotImplemented  # it turns the operation into others on plain tensors, which come back here
        if isinstance(func, torch._ops.OpOverload) and _is_composite(func):
            with self:  # under inference_mode only: otherwise autograd has taken it apart
                return func.decompose(*args, **kwargs)
        out = func(*args, **kwargs)
        self._note(func, args, kwargs, out)
        return out


def _ignore(outputs: object) -> None:
    """Do nothing: a listener that only has the passes observed."""


@functools.cache
def _dispatches_itself(kind: type) -> bool:
    """Return whether a type of tensor turns operations into others, like DTensor; FakeTensor only computes shapes."""
    from torch._subclasses.fake_tensor import FakeTensor

    return hasattr(kind, "__tensor_flatten__") and not issubclass(kind, FakeTensor)


@functools.cache
def _is_composite(func: Any) -> bool:
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd"))


def _name(func: Any) -> str:
    return str(getattr(func, "overloadpacket", func))


def _operand(args: Any) -> torch.Tensor | None:
    """Return what is multiplied: the last tensor of the first two arguments, because `addmm` begins with the addend."""
    tensors = [arg for arg in pytree.tree_leaves(args[:2]) if isinstance(arg, torch.Tensor)]
    return tensors[-1] if tensors else None
