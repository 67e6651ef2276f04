"""A private function of torch's that others want to hear of: wrapped while anybody listens, and put back behind them.

Knows nothing of what is heard.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

import torch

Listener = TypeVar("Listener", bound=Callable[..., None])


class WrappedFunction(Generic[Listener]):
    """An attribute that holds such a function.

    Args:
        owner: Whose attribute it is.
        name: Its name. It is private, so it is looked for when it is used; without it nothing is heard.
        wrap: Makes the wrapper, from the function and from what gives the listeners of the moment.
    """

    def __init__(
        self, owner: Any, name: str, wrap: Callable[[Callable[..., Any], Callable[[], list[Listener]]], Any]
    ) -> None:
        self._owner, self._name, self._wrap = owner, name, wrap
        self._listeners: list[Listener] = []
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
        heard: Listener = torch.compiler.disable(listener)  # in a compiled region it would be compiled as well
        self._listeners.append(heard)
        if self._wrapper is None and self.exists:
            self._install()

        def stop() -> None:
            if heard in self._listeners:
                self._listeners.remove(heard)
            if not self._listeners:
                self._uninstall()

        return stop

    def _install(self) -> None:
        def listeners() -> list[Listener]:
            return list(self._listeners) if self._wrapper is wrapper else []

        self._original = getattr(self._owner, self._name)
        wrapper = self._wrap(self._original, listeners)
        wrapper._torchdynamo_disable = True  # not to be compiled with users' code
        self._wrapper = wrapper
        setattr(self._owner, self._name, wrapper)

    def _uninstall(self) -> None:
        """Take the wrapper off, unless somebody has wrapped it in turn; then it stays, and tells nobody any more."""
        if self._wrapper is not None and getattr(self._owner, self._name, None) is self._wrapper:
            setattr(self._owner, self._name, self._original)
        self._original = self._wrapper = None
