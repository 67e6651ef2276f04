"""The answers of several ranks to one question, as they arrive."""

from __future__ import annotations

import queue
import time

from nbdist.wire.messages.life import Broken
from nbdist.wire.questions.question import A, NoAnswer, Question
from nbdist.wire.questions.questions import Answer


def gather(
    answers: queue.SimpleQueue[Answer | Broken], request: int, question: Question[A], count: int, timeout: float
) -> dict[int, A | NoAnswer]:
    """Take answers until all have arrived, no more come, or the time is over.

    Args:
        answers: The queue in which they arrive; also late answers to other questions.
        request: The question's number.
        count: How many ranks were asked.
        timeout: Seconds.

    Returns:
        The answers that arrived, by rank.
    """
    deadline = time.monotonic() + timeout
    gathered: dict[int, A | NoAnswer] = {}
    while len(gathered) < count:
        try:
            answer = answers.get(timeout=max(0.0, deadline - time.monotonic()))
        except queue.Empty:
            break
        if isinstance(answer, Broken):
            break
        if answer.request == request:
            gathered[answer.rank] = question.checked(answer.body)
    return gathered
