"""The controller's own questions to ranks, and the ranks that have not answered yet."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from nbdist.wire.questions.question import AnswerBody, NoAnswer, Question
from nbdist.wire.questions.questions import Answer, AnyAnswer, Ask
from nbdist.wire.questions.questions import ask as as_message

A = TypeVar("A", bound=AnswerBody)
Handler = Callable[[int, A | NoAnswer, float], None]  # rank, answer, time


class AskRanks(Protocol):
    """Sends a question to control threads. The handler is called with each answer; without one they are dropped."""

    def __call__(self, ranks: Sequence[int], question: Question[A], handler: Handler[A] | None = None) -> None: ...


@dataclass
class _Inquiry:
    question: Question[Any]
    left: set[int]
    handler: Handler[Any]


class Inquiries:
    """Pending questions to the control threads of a set of ranks.

    Args:
        send: Sends a question to ranks.
        dead: Returns the ranks that have died, which are not asked.
    """

    def __init__(self, send: Callable[[Sequence[int], Ask], None], dead: Callable[[], Sequence[int]]) -> None:
        self._send = send
        self._dead = dead
        self._requests = itertools.count(1)
        self._open: dict[int, _Inquiry] = {}

    def ask(self, ranks: Sequence[int], question: Question[A], handler: Handler[A] | None = None) -> None:
        request = next(self._requests)
        dead = set(self._dead())
        living = [rank for rank in ranks if rank not in dead]
        if handler is not None and living:
            self._open[request] = _Inquiry(question, set(living), handler)
        if living:
            self._send(living, as_message(request, [], question, "controller"))

    def answered(self, answer: Answer, now: float) -> None:
        """Handle a rank's answer.

        Raises:
            TypeError: The answer has the wrong type.
        """
        self._take(answer.request, answer.rank, answer.body, now)

    def died(self, rank: int, now: float) -> None:
        """Handle the death of a rank, which will not answer any more."""
        for request in [request for request, inquiry in self._open.items() if rank in inquiry.left]:
            self._take(request, rank, NoAnswer("it has died"), now)

    def renumber(self, numbers: Mapping[int, int]) -> None:
        """Note that ranks have other numbers; those without one will not answer any more."""
        for inquiry in self._open.values():
            inquiry.left = {numbers[rank] for rank in inquiry.left if rank in numbers}

    def _take(self, request: int, rank: int, body: AnyAnswer, now: float) -> None:
        inquiry = self._open.get(request)
        if inquiry is None or rank not in inquiry.left:
            return
        answer = inquiry.question.checked(body)
        inquiry.left.discard(rank)
        if not inquiry.left:
            del self._open[request]
        inquiry.handler(rank, answer, now)
