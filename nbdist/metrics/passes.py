"""Sees every backward pass of this process: the one place through which `backward` and `torch.autograd.grad` go.

Owns the wrapper around torch.autograd's way into its engine, as long as anybody listens. Knows nothing of what the
listeners want to know.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

Listener = Callable[[Sequence[Any]], None]

_NAME = "_engine_run_backward"  # private, so it is looked for when it is used
_NODES = 48  # of a graph that its fingerprint is of, nearest to the loss: 90 µs

_listeners: list[Listener] = []
_original: Callable[..., Any] | None = None
_differentiable = 0  # passes under way whose own operations are recorded (`create_graph=True`)


def listen(listener: Listener) -> Callable[[], None]:
    """Call this before each outermost backward pass, with the tensors it starts from.

    Returns:
        What ends it.
    """
    heard = torch.compiler.disable(listener)  # in a compiled region it would be compiled as well
    _listeners.append(heard)
    _install()

    def stop() -> None:
        if heard in _listeners:
            _listeners.remove(heard)
        if not _listeners:
            _uninstall()

    return stop


def available() -> bool:
    """Whether this torch lets passes be seen."""
    return hasattr(torch.autograd, _NAME) and hasattr(torch._C, "_current_graph_task_id")


def differentiable() -> bool:
    """Whether a pass is under way whose operations are recorded, so that grad mode is on without any recomputation."""
    return _differentiable > 0


def fingerprint(outputs: Sequence[Any]) -> int:
    """What the part of the graph next to the loss looks like: other shapes, depths or branches give another number.

    Reads metadata only: nothing that the graph has saved is unpacked, which could start a recomputation.
    """
    found: list[Any] = []
    todo = [node for node in (getattr(output, "grad_fn", None) for output in outputs) if node is not None]
    seen = set(todo)
    for node in todo:  # grows meanwhile: breadth first
        found.append(node.name())
        found += [tuple(metadata.shape) for metadata in node._input_metadata]
        if len(seen) < _NODES:
            for following, _ in node.next_functions:
                if following is not None and following not in seen:
                    seen.add(following)
                    todo.append(following)
    try:
        return hash(tuple(found))
    except TypeError:  # sizes of ragged tensors have no hash
        return hash(str(found))


def _install() -> None:
    global _original
    if _original is not None or not available():
        return
    _original = original = getattr(torch.autograd, _NAME)

    @functools.wraps(original)
    def run_backward(outputs: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
        global _differentiable
        if torch._C._current_graph_task_id() != -1:  # inside another: reentrant checkpointing
            return original(outputs, *args, **kwargs)
        for listener in list(_listeners):
            listener(outputs)
        recorded = bool(args[2] if len(args) > 2 else kwargs.get("create_graph"))
        _differentiable += recorded
        try:
            return original(outputs, *args, **kwargs)
        finally:
            _differentiable -= recorded

    run_backward._torchdynamo_disable = True  # type: ignore[attr-defined]  # not to be compiled with users' code
    setattr(torch.autograd, _NAME, run_backward)


def _uninstall() -> None:
    """Take the wrapper off, unless somebody has wrapped it in turn; then it stays, and does nothing."""
    global _original
    current = getattr(torch.autograd, _NAME, None)
    if _original is not None and getattr(current, "__wrapped__", None) is _original:
        setattr(torch.autograd, _NAME, _original)
        _original = None
