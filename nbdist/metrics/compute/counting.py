"""Counts the FLOPs of the operations that run: the dispatch mode that sees them, and what it has seen.

Independent of models, steps or time. Model FLOPs are what the mathematics needs; hardware FLOPs add what is computed
again: checkpointed blocks, and the scores that fused attention does not keep. Formulas and conventions: `formulas`.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from nbdist.base import trees
from nbdist.errors import UsageError
from nbdist.metrics.compute import graphs, hidden, torch_parts
from nbdist.metrics.compute.formulas import arithmetic, is_heavy, is_light, work_of
from nbdist.metrics.compute.library_kernels import KernelWork
from nbdist.metrics.compute.operations import Work
from nbdist.metrics.compute.products import Multiplication, product_of
from nbdist.metrics.events import loading, passes

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


class Tally:
    """What operations have taken so far.

    Attributes:
        model: Model FLOPs.
        hardware: Hardware FLOPs.
        without_autograd: Model FLOPs that nothing is differentiated through, outside of backward passes and optimizers.
        per_op: Hardware FLOPs by operation.
        per_dtype: Hardware FLOPs by the dtype of what is multiplied.
        work: Hardware FLOPs by device and arithmetic: the dtype, or "tf32".
        uncounted: Calls of operations without a formula.
        tokens: Indices that were looked up, by the embedding's shape: some are of positions or types.
        batch: Stands for the first indices that were looked up; empty: not known.
        products: Calls by what they multiply.
    """

    def __init__(self) -> None:
        self.model = self.hardware = self.without_autograd = 0
        self.per_op: Counter[str] = Counter()
        self.per_dtype: Counter[str] = Counter()
        self.work: Counter[tuple[torch.device, str]] = Counter()
        self.uncounted: Counter[str] = Counter()
        self.tokens: Counter[tuple[int, ...]] = Counter()
        self.products: Counter[Multiplication] = Counter()
        self.batch = ""

    @property
    def device(self) -> torch.device | None:
        """Where most of the work ran."""
        by_device: Counter[torch.device] = Counter()
        for (device, _), amount in self.work.items():
            by_device[device] += amount
        return max(by_device, key=lambda device: by_device[device], default=None)

    def note(self, func: Any, args: Any, kwargs: Any, out: Any, *, in_optimizer: bool = False) -> None:
        """Note an operation that has run."""
        if is_light(func):
            if func is torch.ops.aten.embedding.default:
                self._add_tokens(*args[:2])
            return
        try:
            work = work_of(func, args, kwargs, out)
        except Exception as error:  # of a formula; the user's step goes on
            self.uncounted[f"{_name(func)} ({type(error).__name__}: {error})"] += 1
            return
        if work is not None:
            self._add(_name(func), _operand(_name(func), args), work, in_optimizer)
            self._add_product(func, args, kwargs)
        elif is_heavy(func):
            self.uncounted[_name(func)] += 1

    def note_kernel(self, name: str, kernel: KernelWork, *, in_optimizer: bool) -> None:
        """Note a kernel that is not an operation of torch."""
        self._add(name, (kernel.device, kernel.dtype), kernel.work, in_optimizer)

    def note_batch(self, indices: torch.Tensor) -> None:
        """Note indices that an embedding looks up, unless others are known."""
        local = getattr(indices, "_local_tensor", indices)  # of a DTensor
        if not self.batch and type(local) is torch.Tensor:
            self.batch = loading.fingerprint(local)

    def add_graph(self, stated: Tally, seen: Tally) -> None:
        """Add a compiled graph.

        Args:
            stated: What it takes by its operations, before they were fused.
            seen: What was seen of it as it ran; more, if it computes something again or pads it.
        """
        self.model += stated.model
        self.without_autograd += stated.without_autograd
        self.hardware += max(stated.hardware, seen.hardware)
        more = stated if stated.hardware >= seen.hardware else seen
        self.per_op += more.per_op
        self.per_dtype += more.per_dtype
        self.work += more.work
        self.products += more.products
        self.uncounted += stated.uncounted
        self.tokens += stated.tokens
        self.batch = self.batch or stated.batch

    def add(self, other: Tally) -> None:
        """Add what was seen elsewhere."""
        self.add_graph(other, other)

    def result(self, how: str) -> FlopCount:
        """Return what has been counted so far."""
        return FlopCount(
            model_flops=self.model,
            hardware_flops=self.hardware,
            per_op=dict(self.per_op.most_common()),
            per_dtype=dict(self.per_dtype.most_common()),
            uncounted=dict(self.uncounted.most_common()),
            how=how,
            tokens=max(self.tokens.values(), default=0),
        )

    def _add_tokens(self, embedding: torch.Tensor, indices: torch.Tensor) -> None:
        is_recomputed = torch._C._current_graph_task_id() != -1
        if indices.dim() > 1 and not is_recomputed:  # one-dimensional ones are of positions
            self.tokens[tuple(embedding.shape)] += indices.numel()
            self.note_batch(indices)

    def _add_product(self, func: Any, args: Any, kwargs: Any) -> None:
        with contextlib.suppress(Exception):  # of a kind that it does not expect; the user's step goes on
            if (found := product_of(func, args, kwargs)) is not None:
                self.products[found] += 1

    def _add(self, name: str, operand: tuple[torch.device, str] | None, work: Work, in_optimizer: bool) -> None:
        whole = work.model + work.repeated
        dtype = "unknown"
        if operand is not None:
            device, dtype = operand
            self.work[device, arithmetic(name, dtype, device)] += whole
        self.hardware += whole
        self.per_op[name] += whole
        self.per_dtype[dtype] += whole
        in_backward = torch._C._current_graph_task_id() != -1
        if in_backward and torch.is_grad_enabled() and not passes.differentiable():
            return  # a recomputation: it is a forward pass, within a backward one
        if not in_backward and not torch.is_grad_enabled():
            if in_optimizer:
                return
            self.without_autograd += work.model
        self.model += work.model


class Counting:
    """Counts what runs in the thread in which it was entered, and in the backward passes that start there.

    As a context manager, or with `enter` and `leave` around a part that is not a block. An operation that raises ends
    the count, as it may have been the count that it could not bear.

    Args:
        eagerly: Whether compiled code runs eagerly inside. Otherwise it runs as it is, and its graphs are counted by
            their operations, if they were made after `graphs.watch`.

    Attributes:
        tally: What has been counted.
        in_optimizer: Set while an optimizer steps: products without autograd are its own then.
        failure: What was raised below it; empty: nothing.

    Raises:
        UsageError: This torch lacks what counting needs.
    """

    def __init__(self, *, eagerly: bool = True) -> None:
        if lacking := torch_parts.lacking():
            raise UsageError(f"{lacking}, so FLOPs can't be counted: use another version")
        self.tally = Tally()
        self.in_optimizer = False
        self.failure = ""
        self._eagerly = eagerly
        self._in_compiled = Tally()  # seen in compiled backward passes
        self._stated = Tally()  # of those whose graphs are known
        self._unknown_graphs: set[str] = set()
        self._runs_graph = False
        kind = _Mode if eagerly else _ModeBesideCompiledCode
        self._mode: Any = kind(self._note, self._fail, self.tally.note_batch)
        self._ends: list[Callable[[], object]] = []

    def __enter__(self) -> Counting:
        self.enter()
        return self

    def __exit__(self, *_: object) -> None:
        self.leave()

    def enter(self) -> None:
        """Count from here on."""
        self._ends = [passes.listen(_ignore)]  # so that differentiable passes are known
        self._ends.append(hidden.listen(self._note_hidden))
        if self._eagerly:  # otherwise a mode would switch it off for good: pytorch/pytorch#140909
            stance = torch.compiler.set_stance("force_eager")
            self._ends.append(lambda: stance.__exit__(None, None, None))
        else:
            self._ends.append(graphs.listen(self._run_graph))
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
        for end in reversed(self._ends):
            end()
        self._ends = []
        return True

    def result(self, how: str) -> FlopCount:
        """Return what has been counted so far."""
        return self.whole().result(how)

    def whole(self) -> Tally:
        """Return all that has been counted so far."""
        found = Tally()
        found.add(self.tally)
        if self._unknown_graphs or not self._stated.hardware:
            found.add(self._in_compiled)
        else:
            found.add_graph(self._stated, self._in_compiled)
        if not self._eagerly and not graphs.are_all_known():
            found.uncounted["kernels of code that was compiled before it was measured"] += 1
        found.uncounted.update(self._unknown_graphs)
        return found

    def _note(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        tally = self._in_compiled if not self._eagerly and graphs.in_backward() else self.tally
        tally.note(func, args, kwargs, out, in_optimizer=self.in_optimizer)

    def _note_hidden(self, name: str, work: KernelWork | None) -> None:
        if self._mode.runs_operation or self._runs_graph:  # those are counted as a whole
            return
        if work is None:
            self.tally.uncounted[name] += 1
        else:
            self.tally.note_kernel(name, work, in_optimizer=self.in_optimizer)

    def _fail(self, error: BaseException) -> None:
        """End the count as soon as that is possible: a mode can't be left from within an operation."""
        self.failure = f"{type(error).__name__}: {error}".splitlines()[0]
        handle = torch.nn.modules.module.register_module_forward_pre_hook(lambda module, args: leave())

        def leave() -> None:
            if self.leave():
                handle.remove()

        self._ends.append(handle.remove)

    def _run_graph(self, graph: graphs.Graph, args: tuple[Any, ...]) -> Any:
        """Run a compiled graph, and add what it takes."""
        try:
            forward, backward = self._work_of_graph(graph, args)
        except Exception as error:  # the user's step goes on
            self._unknown_graphs.add(f"a compiled graph ({type(error).__name__}: {error})".splitlines()[0])
            return graph.compiled(*args)
        outer, self.tally, self._runs_graph = self.tally, Tally(), True
        try:
            out = graph.compiled(*args)
        finally:
            seen, self.tally, self._runs_graph = self.tally, outer, False
        outer.add_graph(forward, seen)
        graphs.before_backward(out, lambda: self._stated.add(backward))
        return out

    def _work_of_graph(self, graph: graphs.Graph, args: tuple[Any, ...]) -> tuple[Tally, Tally]:
        key = graphs.key_of(args)
        found: tuple[Tally, Tally] | None = graph.works.get(key)
        if found is None:
            forward, backward = Tally(), Tally()
            graphs.run_on_shapes(graph, args, lambda tally: _Mode(tally.note, _forget, _ignore), forward, backward)
            found = graph.works[key] = forward, backward
        return found


_under_way: weakref.WeakSet[Counting] = weakref.WeakSet()


def _leave_all() -> None:
    """Stop counting in a process forked while its parent counts, such as a DataLoader's worker."""
    for counting in list(_under_way):
        counting.leave()


os.register_at_fork(after_in_child=_leave_all)


class _Mode(TorchDispatchMode):
    """Tells of each operation that has run on plain tensors, and of the first that has raised.

    Args:
        note: Takes an operation, its arguments, and what it has returned.
        fail: Takes what was raised.
        note_lookup: Takes indices of an embedding that is divided, before each rank looks for its part of them.

    Attributes:
        runs_operation: Whether one is under way.
    """

    supports_higher_order_operators = True

    def __init__(
        self,
        note: Callable[[Any, Any, Any, Any], None],
        fail: Callable[[BaseException], None],
        note_lookup: Callable[[Any], None],
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._note, self._fail, self._note_lookup = note, fail, note_lookup
        self._failed = False
        self.runs_operation = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if types and any(map(_dispatches_itself, types)):
            if func is torch.ops.aten.embedding.default:
                self._note_lookup(args[1])
            return NotImplemented  # it turns the operation into others on plain tensors, which come back here
        if torch.is_inference_mode_enabled() and _is_composite(func) and not any(map(_is_nested, args)):
            with self:  # otherwise autograd has taken it apart
                return func.decompose(*args, **kwargs)
        outermost, self.runs_operation = not self.runs_operation, True
        try:
            out = func(*args, **kwargs)
        except BaseException as error:  # looked at, and passed on
            if not self._failed:
                self._failed = True
                self._fail(error)
            raise
        finally:
            self.runs_operation = not outermost
        if not self._failed:
            self._note(func, args, kwargs, out)
        return out


class _ModeBesideCompiledCode(_Mode):
    """Leaves torch.compile and what it has compiled alone."""

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Return that this mode is not for what is traced; without it torch.compile refuses to work below a mode."""
        return True


def bears_compiled_code() -> bool:
    """Return whether with this torch compiled code can run while it is counted."""
    return hasattr(TorchDispatchMode, "ignore_compile_internals")


def _forget(error: BaseException) -> None:
    """Do nothing: who has run the operation sees the error."""


def _ignore(_: object) -> None:
    """Do nothing, where what is told is not needed."""


@functools.cache
def _dispatches_itself(kind: type) -> bool:
    """Return whether a type of tensor turns operations into others, like DTensor; FakeTensor only computes shapes."""
    fakes = sys.modules.get("torch._subclasses.fake_tensor")  # not loaded: there is none
    return hasattr(kind, "__tensor_flatten__") and not issubclass(kind, getattr(fakes, "FakeTensor", ()))


@functools.cache
def _is_composite(func: Any) -> bool:
    """Return whether an operation consists of others on every device."""
    if not isinstance(func, torch._ops.OpOverload):
        return False
    has = functools.partial(torch._C._dispatch_has_kernel_for_dispatch_key, func.name())
    return bool(has("CompositeImplicitAutograd")) and not any(map(has, ("CPU", "CUDA")))


def _is_nested(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_nested


def _name(func: Any) -> str:
    return str(getattr(func, "overloadpacket", func))


def _operand(name: str, args: Any) -> tuple[torch.device, str] | None:
    """Return where and in what dtype is multiplied: those of the last tensor of the first two arguments.

    (`addmm` begins with the addend.) Weights that are only stored in fewer bits are multiplied in the other's dtype.
    """
    tensors = [arg for arg in trees.leaves(args[:2]) if isinstance(arg, torch.Tensor)]
    if not tensors:
        return None
    operand = tensors[0] if name.startswith("aten._weight_int") else tensors[-1]
    return operand.device, str(operand.dtype).removeprefix("torch.")
