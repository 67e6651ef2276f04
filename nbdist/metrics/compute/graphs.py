"""The graphs of torch.compile: which code calls them, and what each takes by its operations, before they are fused.

Fused kernels are not made of operations that could be counted. So a graph is run once more on the side, without data,
for each shape in which it is called while somebody counts. Independent of FLOPs.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch

from nbdist.base import trees
from nbdist.metrics.events import passes

_VALUES = "_nbdist_values"  # attribute of what stands for integers: lengths and masks decide over work

T = TypeVar("T")
Runner = Callable[["Graph", tuple[Any, ...]], Any]

_older: list[Any] = []  # references to code that was compiled before anybody watched
_runner: Runner | None = None
_thread = 0


class Graph:
    """One compiled graph.

    Attributes:
        compiled: What runs it.
        works: What somebody has found out about it, by `key_of` its arguments.
    """

    def __init__(self, root: torch.fx.GraphModule, compiled: Callable[..., Any]) -> None:
        self.compiled = compiled
        self.works: dict[Hashable, Any] = {}
        self._root = root
        self._operations = torch.fx.Graph()
        self._operations.output(self._operations.graph_copy(root.graph, {}))
        for node in self._operations.nodes:
            node.meta = {}  # keeps fake tensors and their modes

    @functools.cached_property
    def module(self) -> torch.fx.GraphModule:
        """The graph as it was before its backend changed it."""
        return torch.fx.GraphModule(self._root, self._operations)


def listen(runner: Runner) -> Callable[[], None]:
    """Have this run the graphs that this thread calls, instead of their own code; it is to call `Graph.compiled`.

    Returns:
        What ends it.
    """
    global _runner, _thread
    _runner, _thread = runner, threading.get_ident()

    def stop() -> None:
        global _runner
        if _runner == runner:
            _runner = None

    return stop


def watch() -> None:
    """Have all graphs known that are compiled in this process from now on. Again: nothing happens.

    It costs a compiled call a comparison. torch.compile's own modules are not loaded by it.
    """
    if "torch._dynamo.output_graph" in sys.modules:
        _watch_compiler()
    elif not hasattr(torch.compile, "_nbdist_watches"):
        original = torch.compile

        @functools.wraps(original)
        def compile(*args: Any, **kwargs: Any) -> Any:
            torch.compile = original
            _watch_compiler()
            return original(*args, **kwargs)

        compile._nbdist_watches = True  # type: ignore[attr-defined]
        torch.compile = compile


def _watch_compiler() -> None:
    try:  # private, so it is looked for
        from torch._dynamo.output_graph import OutputGraph
    except ImportError:
        return
    original: Any = getattr(OutputGraph, "call_user_compiler", None)
    if original is None or hasattr(original, "_nbdist_watches"):
        return

    @functools.wraps(original)
    def call_user_compiler(self: Any, root: torch.fx.GraphModule, *args: Any, **kwargs: Any) -> Any:
        try:
            graph = Graph(root, _not_compiled)
        except Exception:  # it will be said that it is not known
            return original(self, root, *args, **kwargs)
        graph.compiled = original(self, root, *args, **kwargs)
        return _announced(graph)

    _older.extend(_compiled_code())
    call_user_compiler._nbdist_watches = True  # type: ignore[attr-defined]
    setattr(OutputGraph, "call_user_compiler", call_user_compiler)  # noqa: B010 - mypy knows its signature


def _compiled_code() -> list[Any]:
    """Return references to all code that torch.compile has made here."""
    convert_frame = sys.modules.get("torch._dynamo.convert_frame")
    return list(getattr(getattr(convert_frame, "output_codes", None), "seen", ()))


def are_all_known() -> bool:
    """Return whether no code is left that was compiled before `watch`."""
    return all(reference() is None for reference in _older)


def _not_compiled(*args: Any) -> Any:
    raise AssertionError("a graph was called before it was compiled")


def _announced(graph: Graph) -> Callable[..., Any]:
    compiled = graph.compiled

    def run(*args: Any) -> Any:
        runner = _runner
        if runner is None or threading.get_ident() != _thread:
            return compiled(*args)
        return runner(graph, args)

    return run


def in_backward() -> bool:
    """Return whether a compiled backward pass is being run by this thread."""
    if torch._C._current_graph_task_id() == -1:
        return False
    node: Any = torch._C._current_autograd_node()
    return node is not None and node.name() == passes.COMPILED


def before_backward(out: Any, call: Callable[[], None]) -> None:
    """Call this before the compiled backward pass of a graph.

    Args:
        out: What the graph returned. Without a compiled backward pass nothing is called.
        call: Called once for each time that it runs.
    """
    for leaf in trees.leaves(out):
        node = leaf.grad_fn if isinstance(leaf, torch.Tensor) else None
        if node is not None and node.name() == passes.COMPILED:
            node.register_prehook(lambda gradients: call())
            return


def key_of(args: tuple[Any, ...]) -> Hashable:
    """Return what decides over the work of a graph: shapes, dtypes, and what is differentiated."""
    parts = [(tuple(arg.shape), arg.dtype, arg.requires_grad) if isinstance(arg, torch.Tensor) else arg for arg in args]
    return torch.is_grad_enabled(), torch.is_autocast_enabled(), tuple(map(repr, parts))


def run_on_shapes(graph: Graph, args: tuple[Any, ...], mode_of: Callable[[T], Any], forward: T, backward: T) -> None:
    """Run a graph forward and backward without data, and without a trace in autograd, random numbers or listeners.

    Args:
        graph: The graph.
        args: What it is called with.
        mode_of: Makes the dispatch mode that sees the operations.
        forward: What the mode of the forward pass is made of.
        backward: Likewise of the backward pass, of all results with regard to all arguments.

    Raises:
        Exception: It can't be run without data.
    """
    from torch._dynamo.utils import preserve_rng_state
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.utils._python_dispatch import _disable_current_modes

    with _disable_current_modes(), preserve_rng_state(), passes.unseen(), _single_thread():
        without_data = FakeTensorMode(allow_non_fake_inputs=True)
        fakes = [_fake(arg, without_data) for arg in args]
        with without_data, mode_of(forward):
            out = graph.module(*fakes)
        results = [leaf for leaf in trees.leaves(out) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
        leaves = [leaf for leaf in fakes if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
        if results and leaves:
            with without_data:
                gradients = [torch.ones_like(result) for result in results]
            with without_data, mode_of(backward):
                torch.autograd.grad(results, leaves, gradients, allow_unused=True)


def _fake(value: Any, mode: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    if type(value) not in (torch.Tensor, torch.nn.Parameter) or value.layout is not torch.strided:
        return mode.from_tensor(value, static_shapes=True)
    with mode:
        twin = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
    if not value.is_floating_point():
        setattr(twin, _VALUES, value)
    return twin.requires_grad_(value.requires_grad)


def numbers_in(tensor: torch.Tensor) -> list[int]:
    """Return the values of a tensor of integers that an operation takes, flattened.

    Raises:
        ValueError: It has none: it was made within a graph that is run on shapes.
    """
    from torch.utils._python_dispatch import _disable_current_modes

    found: torch.Tensor = getattr(tensor, _VALUES, tensor)
    if found.device.type == "meta" or type(found).__name__ == "FakeTensor":
        raise ValueError("what decides over its work has no values here")
    with _disable_current_modes():
        return [int(number) for number in found.flatten().tolist()]


@contextmanager
def _single_thread() -> Iterator[None]:
    with torch.autograd.set_multithreading_enabled(False):
        yield
