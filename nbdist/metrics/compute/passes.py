"""Sees every backward pass of this process: the one place through which `backward` and `torch.autograd.grad` go.

Knows nothing of what the listeners want to know.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from nbdist.metrics.compute.listening import WrappedFunction

Listener = Callable[[Sequence[Any]], None]

_COMPILED = "CompiledFunctionBackward"
_NODES = 48  # of a graph that its fingerprint is of, nearest to the loss: 90 µs

_differentiable = 0  # passes under way whose own operations are recorded (`create_graph=True`)


def available() -> bool:
    """Return whether this torch lets passes be seen."""
    return _engine.exists and hasattr(torch._C, "_current_graph_task_id")


def differentiable() -> bool:
    """Return whether a recorded backward pass is in progress, so that grad mode is on without recomputation."""
    return _differentiable > 0


class Fingerprint(NamedTuple):
    """What the part of a pass's graph next to the loss looks like: other shapes, depths or branches differ.

    Attributes:
        nodes: A number for each, nearest to the loss first.
        eager: How many of them come before the first that is compiled code.
    """

    nodes: tuple[int, ...]
    eager: int

    def compiles(self, other: Fingerprint) -> bool:
        """Return whether this may be the pass of the other, with parts of it compiled."""
        return self.eager < len(self.nodes) and self.nodes[: self.eager] == other.nodes[: self.eager]


def fingerprint(outputs: Sequence[Any]) -> Fingerprint:
    """Return what a pass that starts at these looks like.

    Reads metadata only: nothing that the graph has saved is unpacked, which could start a recomputation.
    """
    found: list[int] = []
    eager: int | None = None
    todo = [node for node in (getattr(output, "grad_fn", None) for output in outputs) if node is not None]
    seen = set(todo)
    for node in todo:  # grows meanwhile: breadth first
        name = node.name()
        if eager is None and name == _COMPILED:
            eager = len(found)
        found.append(_number(node, name))
        if len(seen) < _NODES:
            for following, _ in node.next_functions:
                if following is not None and following not in seen:
                    seen.add(following)
                    todo.append(following)
    return Fingerprint(tuple(found), len(found) if eager is None else eager)


def _number(node: Any, name: str) -> int:
    seen: list[Any] = [name, *(tuple(metadata.shape) for metadata in node._input_metadata)]
    if name == _COMPILED:  # each graph has a type of its own; sizes that vary within one are kept as numbers
        seen += [id(type(node)), *getattr(node, "symints", ())]
    try:
        return hash(tuple(seen))
    except TypeError:  # sizes of ragged tensors have no hash
        return hash(str(seen))


def _wrap(original: Callable[..., Any], listeners: Callable[[], list[Listener]]) -> Callable[..., Any]:
    @functools.wraps(original)
    def run_backward(outputs: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
        global _differentiable
        if _is_part_of_another():
            return original(outputs, *args, **kwargs)
        for listener in listeners():
            listener(outputs)
        recorded = bool(args[2] if len(args) > 2 else kwargs.get("create_graph"))
        _differentiable += recorded
        try:
            return original(outputs, *args, **kwargs)
        finally:
            _differentiable -= recorded

    return run_backward


def _is_part_of_another() -> bool:
    """Return whether a pass belongs to one already seen: a reentrant checkpoint's, or one that is only traced."""
    return torch._C._current_graph_task_id() != -1 or torch.compiler.is_compiling()


_engine = WrappedFunction(torch.autograd, "_engine_run_backward", _wrap)
listen = _engine.listen  # with the tensors it starts from, before each outermost pass
