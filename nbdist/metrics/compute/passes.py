"""Sees every backward pass of this process: the one place through which `backward` and `torch.autograd.grad` go.

Knows nothing of what the listeners want to know.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any

import torch

from nbdist.metrics.compute.listening import WrappedFunction

Listener = Callable[[Sequence[Any]], None]

COMPILED = "CompiledFunctionBackward"  # name of the node that runs a compiled backward pass
_NEAR = 2  # nodes that are looked at first
_NODES = 20_000  # of a whole graph, at most
_FIRST, _EVERY = 6, 64  # passes of a lap that are read whole, and one of so many later on
_AT_MOST_EVERY = 16  # passes that one is read whole of because of doubts: times of steps are noisy
_KEPT = 4096  # looks that are remembered

_unseen = 0  # passes of our own under way, which nobody is to hear of
_differentiable = 0  # passes under way whose own operations are recorded (`create_graph=True`)


def available() -> bool:
    """Return whether this torch lets passes be seen."""
    return _engine.exists and hasattr(torch._C, "_current_graph_task_id")


@contextlib.contextmanager
def unseen() -> Iterator[None]:
    """Run passes that no listener hears of."""
    global _unseen
    _unseen += 1
    try:
        yield
    finally:
        _unseen -= 1


def differentiable() -> bool:
    """Return whether a recorded backward pass is in progress, so that grad mode is on without recomputation."""
    return _differentiable > 0


class PassReader:
    """Reads what backward passes look like, so that those that take the same work are known again.

    At first sight that is the part of the graph next to the loss. The whole graph is read of the first passes of a lap,
    now and then, and where something has changed: how many nodes autograd has made since the pass before, or how long
    a step takes. Where passes differ that look alike at first sight, all are read whole from then on.

    Attributes:
        misled: Whether the last pass showed that some before it, back to `trusted`, may have been taken for others.
        trusted: How many passes have been read since the last whole one that was what it looked like.
    """

    def __init__(self) -> None:
        self.misled = False
        self.trusted = 0
        self._always = self._doubts = False
        self._whole: dict[int, int] = {}  # of each that looks like this at first sight
        self._made: dict[int, int] = {}  # nodes since the pass before
        self._passes = 0  # of this lap
        self._last = 0  # node's number

    def restart(self) -> None:
        """Read the next passes whole: what is run may be another thing now."""
        self._passes = self._last = 0
        self._made.clear()

    def doubt(self) -> None:
        """Read the next pass whole."""
        self._doubts = True

    def read(self, outputs: Sequence[Any]) -> Hashable:
        """Return what a pass that starts at these looks like.

        Reads metadata only: nothing that the graph has saved is unpacked, which could start a recomputation.
        """
        self.misled = False
        nodes = [node for node in (getattr(output, "grad_fn", None) for output in outputs) if node is not None]
        near = _fingerprint(nodes, _NEAR)
        self._passes += 1
        if self._always:
            return near, _fingerprint(nodes, _NODES)
        has_changed = self._has_changed(near, nodes)
        doubts = self._doubts and self.trusted >= _AT_MOST_EVERY
        if not (has_changed or doubts or self._passes <= _FIRST or self._passes % _EVERY == 0):
            self.trusted += 1
            return near
        self._doubts = False
        whole = _fingerprint(nodes, _NODES)
        while len(self._whole) > _KEPT:
            del self._whole[next(iter(self._whole))]
        if self._whole.setdefault(near, whole) == whole:
            self.trusted = 0
            return near
        self.misled = self._always = True
        return near, whole

    def _has_changed(self, near: int, nodes: Sequence[Any]) -> bool:
        """Return whether autograd has made more or fewer nodes since the pass before than it did another time."""
        number = nodes[0]._sequence_nr() if nodes else 0
        made, self._last = number - self._last, number
        if made == number:
            return False
        before = self._made.get(near)
        self._made[near] = made
        while len(self._made) > _KEPT:
            del self._made[next(iter(self._made))]
        return before is not None and before != made


def _fingerprint(starts: Sequence[Any], limit: int) -> int:
    """Return a number for the part of a graph that is nearest to its end: other shapes, depths or branches differ."""
    found: list[int] = []
    todo, seen = list(starts), set(starts)
    for node in todo:  # grows meanwhile: breadth first
        found.append(_number(node, node.name()))
        if len(seen) < limit:
            for following, _ in node.next_functions:
                if following is not None and following not in seen:
                    seen.add(following)
                    todo.append(following)
    return hash(tuple(found))


def _number(node: Any, name: str) -> int:
    try:
        seen: list[Any] = [name, *(tuple(metadata.shape) for metadata in node._input_metadata)]
    except RuntimeError:  # nested tensors of the older kind have no shape
        seen = [name]
    if name == COMPILED:  # each graph has a type of its own; sizes that vary within one are kept as numbers
        seen += [id(type(node)), *getattr(node, "symints", ())]
    try:
        return hash(tuple(seen))
    except TypeError:  # sizes of ragged tensors have no hash, and each has a number of its own
        return hash((name, str([_plain(each) for each in seen])))


def _plain(value: Any) -> Any:
    return [size if type(size) is int else "ragged" for size in value] if type(value) is tuple else value


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
    return bool(_unseen) or torch._C._current_graph_task_id() != -1 or torch.compiler.is_compiling()


_engine = WrappedFunction(torch.autograd, "_engine_run_backward", _wrap)
listen = _engine.listen  # with the tensors it starts from, before each outermost pass
