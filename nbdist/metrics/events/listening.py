"""A private function of torch's that others want to hear of: wrapped while anybody listens, and put back behind them.

Independent of what is heard.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

import torch

Listener = TypeVar("Listener", bound=Callable[..., None])

# Returns what would compile the code that is called now: None or False, nothing would. Private, so it is looked for;
# without it a compiled step ends what listens, with the compiler's own words.
_frames: Any = getattr(getattr(torch._C, "_dynamo", None), "eval_frame", None)
compiler = getattr(_frames, "get_eval_frame_callback", lambda: None)


_compiler_flags = vars(torch.compiler)
_TRACED = "_is_compiling_flag"  # likewise; `is_compiling` looks it up in ten times the time


def never_compile(function: Any) -> None:
    """Have this run as it is where compiled code calls it; a compiler that traces its caller traces it, too."""
    with contextlib.suppress(AttributeError):  # private: without it, it is compiled, too, for nothing
        skipped = _frames._FrameExecStrategy(_frames._FrameAction.SKIP, _frames._FrameAction.DEFAULT)
        _frames.set_code_exec_strategy(function.__code__, skipped)


def is_traced() -> bool:
    """Return whether what is called now only runs to be compiled or exported."""
    return _compiler_flags[_TRACED] if _TRACED in _compiler_flags else torch.compiler.is_compiling()


class WrappedFunction(Generic[Listener]):
    """An attribute that holds such a function.

    Args:
        owner: Whose attribute it is.
        name: Its name. It is private, so it is looked for when it is used; without it nothing is heard.
        wrap: Makes the wrapper, from the function and from what gives the listeners of the moment.
        traced: Whether the wrapper lets a compiler trace what it wraps, and calls no listener then; otherwise a graph
            ends there.
    """

    def __init__(
        self,
        owner: Any,
        name: str,
        wrap: Callable[[Callable[..., Any], Callable[[], Sequence[Listener]]], Any],
        *,
        traced: bool = False,
    ) -> None:
        self._owner, self._name, self._wrap, self._is_traced = owner, name, wrap, traced
        self._listeners: tuple[Listener, ...] = ()
        self._disabled: tuple[Listener, ...] = ()  # the same, for within a compiled region: not to be compiled as well
        self._original: Any = None
        self._wrapper: Any = None

    @property
    def exists(self) -> bool:
        """Whether this torch has it."""
        return hasattr(self._owner, self._name)

    def listen(self, listener: Listener) -> Callable[[], None]:
        """Call this from now on.

        Returns:
            What ends it.
        """
        disabled: Listener = listener if self._is_traced else torch.compiler.disable(listener)
        self._listeners, self._disabled = (*self._listeners, listener), (*self._disabled, disabled)
        if self._wrapper is None and self.exists:
            self._install()

        def stop() -> None:
            left = [pair for pair in zip(self._listeners, self._disabled, strict=True) if pair[1] is not disabled]
            self._listeners, self._disabled = tuple(one for one, _ in left), tuple(one for _, one in left)
            if not left:
                self._uninstall()

        return stop

    def _install(self) -> None:
        def listeners() -> Sequence[Listener]:
            if self._wrapper is not wrapper:
                return ()
            return self._listeners if compiler() in (None, False) else self._disabled

        self._original = getattr(self._owner, self._name)
        wrapper = self._wrap(self._original, listeners)
        if not self._is_traced:
            wrapper._torchdynamo_disable = True  # not to be compiled with users' code
        self._wrapper = wrapper
        setattr(self._owner, self._name, wrapper)

    def _uninstall(self) -> None:
        """Take the wrapper off, unless somebody has wrapped it in turn; then it stays, and tells nobody any more."""
        if self._wrapper is not None and getattr(self._owner, self._name, None) is self._wrapper:
            setattr(self._owner, self._name, self._original)
        self._original = self._wrapper = None
