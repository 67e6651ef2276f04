"""What all messages have in common, the bounds of their values, and tables of which function handles which.

Values outside these bounds are refused when decoded.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any, Concatenate, Generic, ParamSpec, TypeAlias, TypeVar

import msgspec

from nbdist.base.checks import LONGEST

VERSION = 1

if TYPE_CHECKING:
    JsonValue: TypeAlias = bool | int | float | str | list["JsonValue"] | dict[str, "JsonValue"] | None
else:
    JsonValue = Any  # msgspec has no recursive types

MimeBundle: TypeAlias = dict[str, JsonValue]  # by MIME type, or by what a front end looks up

M = TypeVar("M")
P = ParamSpec("P")

Seconds = Annotated[float, msgspec.Meta(ge=0, le=LONGEST)]
Size = Annotated[int, msgspec.Meta(ge=0, le=1 << 40)]
Whole = Annotated[int, msgspec.Meta(ge=0, le=1 << 16)]
Count = Annotated[int, msgspec.Meta(ge=1, le=1 << 16)]


class Message(msgspec.Struct, array_like=True, tag=True, frozen=True):
    """Base of all messages."""


class Hello(Message, frozen=True):
    """The first message on each connection."""

    version: int
    pid: int


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
