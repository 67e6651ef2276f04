"""What all questions to the control threads of ranks have in common.

A question is a struct with its arguments; `Question[Answer]` names what it is answered with, so that both ends are
checked by type: who asks (`ask` of the client's traffic, `Inquiries`), and who answers (`Question.by`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar, cast, get_args

import msgspec


class AnswerBody(msgspec.Struct, array_like=True, tag=True, frozen=True):
    """Base of all answers."""


A = TypeVar("A", bound=AnswerBody)
Q = TypeVar("Q")


class Question(msgspec.Struct, Generic[A], array_like=True, tag=True, frozen=True):
    """Base of all questions; `A` is the type of the answer."""

    @classmethod
    def by(cls: type[Q], work: Callable[[Q], A]) -> tuple[type[Q], Callable[[Q], A]]:
        """This question and what answers it, for a table of those that somebody answers."""
        return cls, work

    def checked(self, answer: AnswerBody) -> A | NoAnswer:
        """An answer that has come, of the question's own type or saying why there is none.

        Raises:
            TypeError: It is neither.
        """
        generic: Any = type(self)
        if not isinstance(answer, (NoAnswer, *get_args(generic.__orig_bases__[0]))):
            raise TypeError(f"{type(self).__name__} was answered with {type(answer).__name__}")
        return cast("A", answer)


class NoAnswer(AnswerBody, frozen=True):
    """Why there is no answer: the rank has died, is too busy, or the work has raised."""

    why: str


class Done(AnswerBody, frozen=True):
    """What was asked for has been done."""
