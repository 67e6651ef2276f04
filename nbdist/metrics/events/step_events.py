"""When an optimizer's step begins and ends: the one place that hooks every step, for all who want to know.

A step is an outermost call of `Optimizer.step` in one thread, outside of backward passes. What GradScaler skips is
none; a call inside another one, as of wrapped and inherited optimizers, is part of it. An engine's step is one, too:
DeepSpeed's calls its optimizer once for each group of parameters, and exchanges what they have become behind that.
Independent of cells or time.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType, ModuleType
from typing import TYPE_CHECKING, Any

from nbdist.base.imports import after_import

if TYPE_CHECKING:
    from torch.optim import Optimizer

Heard = Callable[["Optimizer"], object]

# Methods of engines that make one step, whatever optimizers they call, by module and class.
_ENGINES = {
    ("deepspeed.runtime.engine", "DeepSpeedEngine"): "step",
    ("deepspeed.runtime.pipe.engine", "PipelineEngine"): "train_batch",
}


@dataclass(frozen=True, eq=False)
class _Listener:
    before: Heard | None
    after: Heard | None
    over: Callable[[], object] | None
    compiled: bool


class StepEvents:
    """The steps of the thread that makes this. All calls in that thread but `stepping`.

    Attributes:
        frame: The call of torch's in which a step is under way, None if none is.
    """

    def __init__(self) -> None:
        self.frame: FrameType | None = None
        self._thread = threading.get_ident()
        self._stack: list[Optimizer] = []  # whose steps have begun
        self._listeners: list[_Listener] = []
        self._before: list[Heard] = []
        self._after: list[Heard] = []
        self._over: list[Callable[[], object]] = []
        self._handles: list[Any] = []
        self._see_compiled = False  # the hooks that are installed
        self._engine: FrameType | None = None  # in which an engine makes a step

    def listen(
        self,
        *,
        before: Heard | None = None,
        after: Heard | None = None,
        over: Callable[[], object] | None = None,
        compiled: bool = False,
    ) -> Callable[[], None]:
        """Call these from now on, in the order in which they came. If torch lacks what it needs, nothing is heard.

        Args:
            before: Called with the optimizer before each step; it may wait, or raise so that the step is not made.
            after: Called with it when the step is whole and still counts as under way.
            over: Called when it does no longer; it may raise.
            compiled: Whether steps that torch.compile has taken in are wanted, too. That breaks their graphs at the
                step; without anybody who wants it, compiled code has nothing of this in it.

        Returns:
            What ends it.
        """
        listener = _Listener(before, after, over, compiled)
        self._listeners.append(listener)
        self._arrange()

        def stop() -> None:
            if listener in self._listeners:
                self._listeners.remove(listener)
                self._arrange()

        return stop

    @property
    def in_step(self) -> bool:
        """Whether the caller was called by a step: one that has raised is not under way any more."""
        return bool(self._stack) and _is_running(self.frame, sys._getframe(1))

    @property
    def stepping(self) -> bool:
        """Like `in_step`, from another thread."""
        return bool(self._stack) and _is_running(self.frame, sys._current_frames().get(self._thread))

    def forget(self) -> None:
        """Forget what a step that raised left behind: no step is in progress."""
        self._stack.clear()
        self.frame = None

    def as_one(self, make: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call what makes one step of an engine, or gathers gradients only; what optimizers do inside is part of it."""
        if self._engine is not None:
            return make(*args, **kwargs)
        self._engine = sys._getframe()
        try:
            result = make(*args, **kwargs)
        finally:
            self._engine = None
        if self._stack and self.frame is sys._getframe():
            self._end(self._stack[0])
        return result

    def _arrange(self) -> None:
        """Have the hooks that the listeners of now need; a step that is under way goes on with those it had."""
        self._before = [one.before for one in self._listeners if one.before is not None]
        self._after = [one.after for one in self._listeners if one.after is not None]
        self._over = [one.over for one in self._listeners if one.over is not None]
        see_compiled = any(one.compiled for one in self._listeners)
        if self._handles and (not self._listeners or see_compiled != self._see_compiled):
            for handle in self._handles:
                handle.remove()
            self._handles = []
        if self._listeners and not self._handles and not missing():
            self._install(see_compiled)

    def _install(self, see_compiled: bool) -> None:
        from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

        before, after = self._hooks(see_compiled)
        self._handles = [register_optimizer_step_pre_hook(before), register_optimizer_step_post_hook(after)]
        self._see_compiled = see_compiled
        _watch_engines()

    def _hooks(self, see_compiled: bool) -> tuple[Callable[..., None], Callable[..., None]]:
        """Return what torch calls before and after each step. Kept tight: it runs in every step of every cell."""
        import torch

        stack, mine, thread, caller = self._stack, self._thread, threading.get_ident, sys._getframe
        graph_task, is_traced = torch._C._current_graph_task_id, torch.compiler.is_dynamo_compiling
        vanishes = not see_compiled

        def before(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
            if (vanishes and is_traced()) or graph_task() != -1 or thread() != mine:
                return
            if stack and not self.in_step:
                stack.clear()  # that step has raised, so nobody told us of its end
            if not stack:
                for call in self._before:
                    call(optimizer)
                self.frame = self._engine or caller(1)
            stack.append(optimizer)

        def after(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
            if (vanishes and is_traced()) or graph_task() != -1 or thread() != mine:
                return
            if (len(stack) != 1 or stack[0] is not optimizer) and not self._ends_outermost(optimizer):
                return
            if self._engine is None:
                self._end(optimizer)

        if see_compiled:
            for hook in (before, after):
                hook._torchdynamo_disable = True  # type: ignore[attr-defined]  # traced, they'd be compiled each step
        return before, after

    def _end(self, optimizer: Optimizer) -> None:
        for call in self._after:
            call(optimizer)
        self._stack.clear()
        self.frame = None
        for done in self._over:
            done()

    def _ends_outermost(self, optimizer: Optimizer) -> bool:
        """Return whether the outermost step ends with this one. Optimizers that wrap others step in a step."""
        while self._stack and self._stack[-1] is not optimizer:
            self._stack.pop()  # it has raised, and the wrapper went on
        if len(self._stack) == 1:
            return True
        del self._stack[-1:]
        return False


_by_thread: dict[int, StepEvents] = {}


def of_this_thread() -> StepEvents:
    """Return the steps of the thread that calls it: always the same."""
    return _by_thread.setdefault(threading.get_ident(), StepEvents())


@functools.cache
def _watch_engines() -> None:
    """Have the engines of libraries make steps that are whole, once these are imported."""
    for module, _ in _ENGINES:
        after_import(module, _watch_engine)


def _watch_engine(module: ModuleType) -> None:
    for (place, name), method in _ENGINES.items():
        kind = getattr(module, name, None) if module.__name__ == place else None
        make = getattr(kind, method, None)
        if make is not None:
            setattr(kind, method, _whole(make))


def _whole(make: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(make)
    def whole(*args: Any, **kwargs: Any) -> Any:
        events = _by_thread.get(threading.get_ident())
        return make(*args, **kwargs) if events is None else events.as_one(make, *args, **kwargs)

    return whole


def missing() -> str:
    """Return why nothing can be heard of steps with this torch; empty: it can."""
    import torch
    from torch.optim import optimizer

    has_hooks = hasattr(optimizer, "register_optimizer_step_pre_hook")
    if has_hooks and hasattr(torch._C, "_current_graph_task_id"):
        return ""
    return f"torch {torch.__version__} has no global optimizer hooks, or can't tell a step in backward"


def _is_running(wanted: FrameType | None, innermost: FrameType | None) -> bool:
    """Return whether this frame has called, directly or not, the innermost one."""
    frame = innermost
    while frame is not None and frame is not wanted:
        frame = frame.f_back
    return frame is not None
