"""Sees when the loop of a thread evaluates: code that runs without gradients, and between `model.eval()` and `train()`.

Code without gradients alone may be part of the training, as a teacher is. What torch itself runs without them, such as
clipping gradients, is not seen, nor is `torch.set_grad_enabled(False)` outside of a `with` block. Independent of steps.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any, Literal

import torch
import torch.utils._contextlib as contextlib_of_torch
from torch import nn

from nbdist.metrics.events import passes
from nbdist.metrics.events.listening import WrappedFunction, compiler, never_compile

# What is heard: gradients are switched off, or on again; a model is switched to evaluation, or to training again.
Sign = Literal["off", "on", "eval", "train"]
Listener = Callable[[Sign, Any], None]
# A part of a step: training, an evaluation, or code without gradients that may be either.
Part = Literal["training", "evaluation", "without gradients"]


def listen(listener: Listener) -> Callable[[], None]:
    """Call this with each sign and the model that it is of, None for gradients. In any thread.

    Returns:
        What ends it.
    """

    def hear(sign: Sign, of: Any) -> None:
        if sign == "eval" and not training:
            training.append(_train.listen(hear))
        elif sign == "train" and training:
            training.pop()()  # it is called for each part of a model, so it is listened to only while that matters
        listener(sign, of)

    training: list[Callable[[], None]] = []
    ends = [place.listen(hear) for place in (*_switches, _eval) if place.exists]

    def stop() -> None:
        for end in (*ends, *training):
            end()

    return stop


def _switch(original: Callable[..., Any], listeners: Callable[[], Sequence[Listener]]) -> Callable[..., Any]:
    """Tell of a context manager that switches gradients off or on; of one in another one of the kind nothing."""

    @functools.wraps(original)
    def switch(context: Any, *args: Any) -> Any:
        if compiler() not in (None, False):
            return original(context, *args)
        before = torch.is_grad_enabled() if type(context) is not torch.set_grad_enabled or args else context.prev
        result = original(context, *args)
        after = torch.is_grad_enabled()
        if before != after and not _is_torchs_own(sys._getframe(1)):
            for listener in listeners():
                listener("on" if after else "off", None)
        return result

    never_compile(switch)
    return switch


def _is_torchs_own(caller: FrameType | None) -> bool:
    while caller is not None and caller.f_globals is vars(contextlib_of_torch):
        caller = caller.f_back  # of a decorated function
    name: str = "" if caller is None else caller.f_globals.get("__name__", "")
    return name.startswith("torch.")


def _call(sign: Sign) -> Callable[..., Any]:
    """Return what wraps a method of modules. A compiler that traces it sees the method alone."""

    def wrap(original: Callable[..., Any], listeners: Callable[[], Sequence[Listener]]) -> Callable[..., Any]:
        @functools.wraps(original)
        def call(module: Any, *args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_dynamo_compiling() or compiler() not in (None, False):
                return original(module, *args, **kwargs)
            if sign == "eval" or (args[0] if args else kwargs.get("mode", True)):
                for listener in listeners():
                    listener(sign, module)
            return original(module, *args, **kwargs)

        never_compile(call)
        return call

    return wrap


_switches = [
    WrappedFunction[Listener](context, name, _switch)
    for context in (torch.no_grad, torch.inference_mode, torch.set_grad_enabled)
    for name in ("__enter__", "__exit__")
]
_eval = WrappedFunction[Listener](nn.Module, "eval", _call("eval"), traced=True)
_train = WrappedFunction[Listener](nn.Module, "train", _call("train"), traced=True)


class Evaluations:
    """Times evaluations within a step, from the first sign of one to the last.

    Args:
        tick: Ends a part of the step. Called with what it was. What comes between two blocks of an evaluation is part
            of it.

    Attributes:
        has_signs: Whether there was one since it was cancelled.
    """

    def __init__(self, tick: Callable[[Part], object]) -> None:
        self._tick = tick
        self.has_signs = False
        self._is_open = self._is_sure = False
        self._nodes_at_end = -1  # made by autograd by then: a forward pass that trains makes some

    @property
    def under_way(self) -> bool:
        """Whether one has begun for sure, and no forward pass that trains has come since."""
        return self._is_sure and (self._is_open or self._nodes_at_end == passes.nodes_made())

    @property
    def seems_under_way(self) -> bool:
        """The same as far as another thread can know it: autograd counts by thread."""
        return self._is_sure

    def begin(self, *, sure: bool = False) -> None:
        """Note that one begins, or continues.

        Args:
            sure: Whether it is one. Otherwise it is only if that turns out before its end.
        """
        if not (self._is_open or self.under_way):
            self._tick("training")
        self._is_sure = sure or self.under_way
        self._is_open = self.has_signs = True

    def end(self, *, trains: bool = False) -> None:
        """Note that it is over, unless it continues before the training does.

        Args:
            trains: Whether the training continues now.
        """
        if self._is_open:
            self._tick("evaluation" if self._is_sure else "without gradients")
            self._is_open, self._nodes_at_end = False, passes.nodes_made()
        self._is_sure = self._is_sure and not trains

    def cancel(self) -> bool:
        """Note that the training goes on.

        Returns:
            Whether something had begun and not ended: it was part of the training, in evaluation mode, perhaps.
        """
        was_open = self._is_open
        self.has_signs = False
        self._is_open = self._is_sure = False
        self._nodes_at_end = -1
        return was_open
