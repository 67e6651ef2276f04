"""Answers of ranks: those of several to one question, and those of one rank that keep coming."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from nbdist.wire.base.message import Message
from nbdist.wire.messages.life import Broken
from nbdist.wire.questions.question import A, AnswerBody, NoAnswer, Question
from nbdist.wire.questions.questions import Answer, ask

_LOOK = 0.5  # seconds


def gather(
    answers: queue.SimpleQueue[Answer | Broken],
    request: int,
    question: Question[A],
    count: int,
    timeout: float,
    wanted: Callable[[], bool] = lambda: True,
) -> dict[int, A | NoAnswer]:
    """Take answers until all have arrived, no more come, or the time is over.

    Args:
        answers: The queue in which they arrive; also late answers to other questions.
        request: The question's number.
        count: How many ranks were asked.
        timeout: Seconds.
        wanted: Asked every half second whether they are still waited for.

    Returns:
        The answers that arrived, by rank.
    """
    deadline = time.monotonic() + timeout
    gathered: dict[int, A | NoAnswer] = {}
    while len(gathered) < count:
        left = deadline - time.monotonic()
        try:
            answer = answers.get(timeout=min(max(0.0, left), _LOOK))
        except queue.Empty:
            if left > _LOOK and wanted():
                continue
            break
        if isinstance(answer, Broken):
            break
        if answer.request == request:
            gathered[answer.rank] = question.checked(answer.body)
    return gathered


class AnswerStream:
    """Answers of a rank's control thread that keep coming, while they do. Does not know what they carry.

    Args:
        rank: Whose.
        take: Called with each answer, in the listening thread; with a NoAnswer when no more come.
        send: Sends a message.
    """

    def __init__(self, rank: int, take: Callable[[AnswerBody], None], send: Callable[[Message], None]) -> None:
        self.rank, self.take = rank, take
        self._send = send

    def tell(self, question: Question[Any]) -> None:
        """Send something that belongs to it, in order. From any thread."""
        self._send(ask(0, [self.rank], question))


class AnswerStreams:
    """Those of one session.

    Args:
        send: Sends a message.
        request: Returns the number of a new request.
    """

    def __init__(self, send: Callable[[Message], None], request: Callable[[], int]) -> None:
        self._send, self._request = send, request
        self._open: dict[int, AnswerStream] = {}
        self._lock = threading.Lock()

    def open(self, rank: int, question: Question[Any], take: Callable[[AnswerBody], None]) -> AnswerStream:
        """Ask what is answered again and again. From any thread; arguments as of `AnswerStream`."""
        request, stream = self._request(), AnswerStream(rank, take, self._send)
        with self._lock:
            self._open[request] = stream
        self._send(ask(request, [rank], question))
        return stream

    def answered(self, answer: Answer) -> None:
        """Handle an answer, if it belongs to one."""
        if (stream := self._open.get(answer.request)) is None:
            return
        if isinstance(answer.body, NoAnswer):
            self._close(answer.request)
        stream.take(answer.body)

    def renumber(self, numbers: Mapping[int, int]) -> None:
        """Know ranks by other numbers; the streams of those without one end."""
        for request, stream in self._all():
            if stream.rank in numbers:
                stream.rank = numbers[stream.rank]
            else:
                self._end(request, stream)

    def died(self, rank: int) -> None:
        """End those of a rank."""
        for request, stream in self._all():
            if stream.rank == rank:
                self._end(request, stream)

    def end(self) -> None:
        """End all."""
        for request, stream in self._all():
            self._end(request, stream)

    def _all(self) -> list[tuple[int, AnswerStream]]:
        with self._lock:
            return list(self._open.items())

    def _end(self, request: int, stream: AnswerStream) -> None:
        self._close(request)
        stream.take(NoAnswer("it has ended"))

    def _close(self, request: int) -> None:
        with self._lock:
            self._open.pop(request, None)
