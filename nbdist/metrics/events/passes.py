"""Sees every backward pass of this process: the one place through which `backward` and `torch.autograd.grad` go.

Independent of what the listeners want to know.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any

import torch

from nbdist.metrics.events.listening import WrappedFunction, is_traced

Listener = Callable[[Sequence[Any]], None]

COMPILED = "CompiledFunctionBackward"  # name of the node that runs a compiled backward pass
_SAME = {"ReshapeAliasBackward0": "ViewBackward0"}  # below a dispatch mode, as of a count, torch makes the latter
_NEAR = 2  # nodes that are looked at first
_NODES = 20_000  # of a whole graph, at most
_FIRST, _EVERY = 6, 256  # passes of a lap that are read whole, and one of so many later on
_ALIKE, _GLANCES = 64, 8  # passes in a row that look alike, after which one of so many is looked at
_WARIER = 8  # times as many in a row are asked for, each time that one is found to look different after all
_AT_MOST_EVERY = 16  # passes that one is read whole of because of doubts: times of steps are noisy
_KEPT = 4096  # looks that are remembered

# Nodes that autograd has made in this thread. The number of the loss's node would do as well, but Python has no object
# for that node yet, which costs 5 µs.
nodes_made: Callable[[], int] = getattr(getattr(torch._C, "_autograd", None), "_get_sequence_nr", lambda: 0)

_unseen = 0  # passes of our own under way, which nobody is to hear of
_differentiable = 0  # passes under way whose own operations are recorded (`create_graph=True`)


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

    At first sight that is the part of the graph next to the loss, and how many nodes autograd has made since the pass
    before; once many have looked alike, mostly the latter alone. The whole graph is read of the first passes of a lap,
    now and then, and where something has changed: that number, or how long a step takes. Where passes differ that look
    alike at first sight, all are read whole from then on, and also where that takes next to nothing.

    Attributes:
        spent: Seconds that reading whole graphs has taken.
        cost: Seconds that the last one took.
        is_cheap: Set while that is next to nothing beside a step.
        suspects: How many passes before the last one it shows to have been taken for others, perhaps.
        oldest: Number of the first node that the last pass differentiates, as `nodes_made` counts; 0: not known. What
            has made the nodes before it, since the pass before, was no training.
    """

    def __init__(self) -> None:
        self.spent = self.cost = 0.0
        self.is_cheap = False
        self.suspects = self.oldest = 0
        self._since_whole = 0  # passes since the last whole one that was what it looked like
        self._always = self._doubts = False
        self._whole: dict[int, int] = {}  # of each that looks like this at first sight
        self._made: dict[int, int] = {}  # nodes since the pass before
        self._trained: dict[tuple[int, int], int] = {}  # of these, those from the oldest on, by both; 0: not known
        self._behind = 0  # the same, of the last pass that was looked at
        self._passes = 0  # of this lap
        self._last = 0  # nodes made by then
        self._near = 0  # at first sight, of the last pass that was looked at
        self._alike = 0  # passes in a row that have looked so
        self._enough = _ALIKE  # of these
        self._usual = 0  # nodes made since the pass before it
        self._at_a_glance = 0  # passes that are known by that number alone, from the one that was looked at on
        self._unlooked = 0  # of these, still to come

    def restart(self) -> None:
        """Read the next passes whole: what is run may be another thing now."""
        self._passes = self._last = self._alike = self._at_a_glance = self._unlooked = 0
        self._made.clear()
        self._enough = _ALIKE

    def doubt(self) -> None:
        """Read the next pass whole."""
        self._doubts = True

    def look_closely(self) -> None:
        """Look at each pass for a while: batches are of another shape."""
        self._end_glance()
        self._alike = 0

    def read(self, outputs: Sequence[Any]) -> Hashable:
        """Return what a pass that starts at these looks like.

        Reads metadata only: nothing that the graph has saved is unpacked, which could start a recomputation.
        """
        number = nodes_made()
        made, self._last = number - self._last, number
        if self._unlooked and made == self._usual and not self.is_cheap:
            self._unlooked -= 1
            self.oldest = number - self._behind if self._behind else 0
            return self._near
        self._end_glance()
        return self._look(outputs, made)

    def _end_glance(self) -> None:
        """Count the passes that were not looked at; the next one is."""
        skipped = self._at_a_glance - self._unlooked
        self._passes += skipped
        self._since_whole += skipped
        self._at_a_glance = self._unlooked = 0

    def _look(self, outputs: Sequence[Any], made: int) -> Hashable:
        self._passes += 1
        self.suspects = 0
        nodes = [node for output in outputs if (node := getattr(output, "grad_fn", None)) is not None]
        near, _ = _fingerprint(nodes, _NEAR)
        if self._always:
            return near, self._read_whole(nodes)
        if near != self._near and self._alike >= self._enough:
            self.suspects = min(_GLANCES - 1, self._since_whole)
            self._enough *= _WARIER
        self._alike = self._alike + 1 if near == self._near else 0
        self._near, self._usual = near, made
        self._at_a_glance = self._unlooked = _GLANCES - 1 if self._alike >= self._enough else 0
        has_changed = self._has_changed(near, made)
        doubts = self._doubts and self._since_whole >= _AT_MOST_EVERY
        if not (has_changed or doubts or self.is_cheap or self._passes <= _FIRST or self._since_whole >= _EVERY):
            self._since_whole += 1
            self._behind = self._trained.get((near, made), 0)
            self.oldest = self._last - self._behind if self._behind else 0
            return near
        self._doubts = False
        whole = self._read_whole(nodes)
        self._behind = self._trained[near, made] = self._last - self.oldest if self.oldest else 0
        while len(self._trained) > _KEPT:
            del self._trained[next(iter(self._trained))]
        while len(self._whole) > _KEPT:
            del self._whole[next(iter(self._whole))]
        if self._whole.setdefault(near, whole) == whole:
            self._since_whole = 0
            return near
        self.suspects, self._always = self._since_whole, True
        self.look_closely()
        return near, whole

    def _read_whole(self, nodes: Sequence[Any]) -> int:
        began = time.perf_counter()
        whole, seen = _fingerprint(nodes, _NODES)
        with contextlib.suppress(AttributeError, ValueError):  # a node without a number, or none at all
            self.oldest = min(node._sequence_nr() for node in seen) if len(seen) < _NODES else 0
        self.cost = time.perf_counter() - began
        self.spent += self.cost
        return whole

    def _has_changed(self, near: int, made: int) -> bool:
        """Return whether autograd has made more or fewer nodes since the pass before than it did another time."""
        if made == self._last:
            return False
        before = self._made.get(near)
        self._made[near] = made
        while len(self._made) > _KEPT:
            del self._made[next(iter(self._made))]
        return before is not None and before != made


def _fingerprint(starts: Sequence[Any], limit: int) -> tuple[int, list[Any]]:
    """Return a number for the part of a graph that is nearest to its end: other shapes, depths or branches differ.

    Returns:
        The number, and the nodes of that part.
    """
    found: list[int] = []
    todo, seen = list(starts), set(starts)
    for node in todo:  # grows meanwhile: breadth first
        inputs = node.next_functions
        name = _SAME.get(node.name(), node.name())
        found.append(_number(node, name) if inputs else hash(name))  # the gradient of a parameter has its shape
        if len(seen) < limit:
            for following, _ in inputs:
                if following is not None and following not in seen:
                    seen.add(following)
                    todo.append(following)
    return hash(tuple(found)), todo


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


def _wrap(original: Callable[..., Any], listeners: Callable[[], Sequence[Listener]]) -> Callable[..., Any]:
    graph_task = torch._C._current_graph_task_id

    @functools.wraps(original)
    def run_backward(outputs: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
        global _differentiable
        if _unseen or graph_task() != -1 or is_traced():
            return original(
                outputs, *args, **kwargs
            )  # part of one already seen: a reentrant checkpoint's, or only traced
        for listener in listeners():
            listener(outputs)
        if not (args[2] if len(args) > 2 else kwargs.get("create_graph")):
            return original(outputs, *args, **kwargs)
        _differentiable += 1
        try:
            return original(outputs, *args, **kwargs)
        finally:
            _differentiable -= 1

    return run_backward


_engine = WrappedFunction(torch.autograd, "_engine_run_backward", _wrap)
listen = _engine.listen  # with the tensors it starts from, before each outermost pass
