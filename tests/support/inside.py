"""What tests do with a session that its users can't. Imported by tests, and in the kernels that they start."""

from __future__ import annotations

from typing import TypeVar

from nbdist.client.ranks.task_record import CellOptions
from nbdist.client.ranks.traffic import Traffic
from nbdist.client.session.session import Session, rank_set_of
from nbdist.wire.questions.question import AnswerBody, NoAnswer, Question

A = TypeVar("A", bound=AnswerBody)


def traffic_of(session: Session) -> Traffic:
    """Which rank runs what, and the way to ask ranks."""
    return rank_set_of(session).traffic


def ask(session: Session, question: Question[A], timeout: float = 30.0) -> dict[int, A | NoAnswer]:
    """What two ranks answer."""
    return traffic_of(session).ask([0, 1], question, timeout=timeout)


def living(session: Session) -> list[int]:
    """The ranks that are not known to be dead; asks none of them."""
    return rank_set_of(session).living()


def submit_unsendable(session: Session) -> None:
    """Give ranks a cell whose number no message can hold."""
    rank_set_of(session).submit("cell", "1", None, CellOptions(number=1 << 70))
