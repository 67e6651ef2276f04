"""Which function handles which type of message."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar

M = TypeVar("M")
P = ParamSpec("P")


class Handlers(Generic[P]):
    """A table from the type of a message to its handler, which is called with the message and what the call adds."""

    def __init__(self) -> None:
        self._by_type: dict[type, Callable[Concatenate[Any, P], object]] = {}

    def on(self, kind: type[M], handle: Callable[Concatenate[M, P], object]) -> Handlers[P]:
        """Have a type of message handled by a function. Returns the table."""
        self._by_type[kind] = handle
        return self

    def __call__(self, message: object, *more: P.args, **named: P.kwargs) -> bool:
        """Handle a message. Returns whether its type is in the table."""
        handle = self._by_type.get(type(message))
        if handle is None:
            return False
        handle(message, *more, **named)
        return True
