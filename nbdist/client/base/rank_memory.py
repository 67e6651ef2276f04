"""The memory that ranks hold: by themselves, or where they do not answer, as their machines see it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from nbdist.base import limits
from nbdist.wire.questions.knowing import GetMemory, GetMemoryFromOutside, ProcessMemory
from nbdist.wire.questions.question import A, NoAnswer, Question


class Asking(Protocol):
    """Asks ranks, or the agents of their machines."""

    def ask(self, ranks: Sequence[int], question: Question[A], *, timeout: float) -> dict[int, A | NoAnswer]:
        """Ask the ranks, and return the answers that arrive within `timeout` seconds."""


def memory_of(traffic: Asking, ranks: Sequence[int]) -> dict[int, ProcessMemory]:
    """Return what living ranks hold; without those of which nobody answers. Takes a second for each."""
    found = _answers(traffic, ranks, GetMemory())
    silent = [rank for rank in ranks if rank not in found]
    return found | _answers(traffic, silent, GetMemoryFromOutside())


def _answers(traffic: Asking, ranks: Sequence[int], question: Question[ProcessMemory]) -> dict[int, ProcessMemory]:
    answers = traffic.ask(ranks, question, timeout=limits.STATUS_ANSWER) if ranks else {}
    return {rank: answer for rank, answer in answers.items() if isinstance(answer, ProcessMemory)}
