"""What all questions to the control threads of ranks have in common.

A question is a struct with its arguments; `Question[Answer]` names the type of its answer, so that both ends are
type-checked: the one that asks (`ask` of the client's traffic, `Inquiries`) and the one that answers (`Question.by`).
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
        """Return this question and the function that answers it, for a table of such pairs."""
        return cls, work

    def checked(self, answer: AnswerBody) -> A | NoAnswer:
        """Return an answer, checked to be of the question's own type or a NoAnswer.

        Raises:
            TypeError: The answer is of neither type.
        """
        generic: Any = type(self)
        if not isinstance(answer, (NoAnswer, *get_args(generic.__orig_bases__[0]))):
            raise TypeError(f"{type(self).__name__} was answered with {type(answer).__name__}")
        return cast("A", answer)


class NoAnswer(AnswerBody, frozen=True):
    """Why there is no answer: the rank has died, is too busy, or the work raised."""

    why: str


class Done(AnswerBody, frozen=True):
    """The request has been carried out."""
