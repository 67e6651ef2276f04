"""Questions and answers on the wire: each arrives as what it was, and none is taken for another's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, get_args

import pytest

from nbdist.controller.base.inquiries import Inquiries
from nbdist.wire.base.rank_spans import RankSpans
from nbdist.wire.frames import decode, encode
from nbdist.wire.questions import knowing, stopping
from nbdist.wire.questions.knowing import GetMemory, Inspect, Inspection, ProcessMemory
from nbdist.wire.questions.question import Done, NoAnswer, Question
from nbdist.wire.questions.questions import Answer, AnyAnswer, AnyQuestion, Ask, ask
from nbdist.wire.questions.stopping import Cut, GetState, GroupState, RankState

QUESTIONS = [
    kind
    for module in (stopping, knowing)
    for kind in vars(module).values()
    if isinstance(kind, type) and issubclass(kind, Question) and kind is not Question
]


@pytest.mark.parametrize("question", QUESTIONS)
def test_each_question_and_its_answer_can_be_sent(question: Any) -> None:
    assert question in get_args(AnyQuestion)
    assert set(get_args(question.__orig_bases__[0])) <= set(get_args(AnyAnswer))


@pytest.mark.parametrize(
    "message",
    [
        ask(3, [0, 1], Cut(7, force=True)),
        Answer(
            3, 1, RankState({"0": GroupState(RankSpans.of([0, 1]), [4], cut=True)}, count=2, current=True), "controller"
        ),
        Answer(3, 1, Inspection({"text/plain": "a text"})),
        Answer(3, 1, NoAnswer("RuntimeError: no")),
    ],
)
def test_a_message_arrives_as_what_it_was(message: Ask | Answer) -> None:
    assert decode(encode(message)) == message


def test_an_answer_with_text_that_no_frame_can_hold_arrives_escaped() -> None:
    arrived = decode(encode(Answer(3, 1, Inspection({"text/plain": "caf\udce9"}))))
    assert arrived == Answer(3, 1, Inspection({"text/plain": "caf\\udce9"}))


class Asked:
    """Inquiries to ranks 0 and 1, of which the second may be dead."""

    def __init__(self, dead: list[int] | None = None) -> None:
        self.sent: list[Ask] = []
        self.asked: list[list[int]] = []
        self.heard: list[tuple[int, object]] = []
        self.inquiries = Inquiries(self._send, lambda: dead or [])
        self.inquiries.ask([0, 1], GetState(7), lambda rank, answer, now: self.heard.append((rank, answer)))

    def _send(self, ranks: Sequence[int], message: Ask) -> None:
        self.asked.append(list(ranks))
        self.sent.append(message)

    def answer(self, rank: int, body: AnyAnswer) -> None:
        self.inquiries.answered(Answer(self.sent[0].request, rank, body, "controller"), 1.0)


def test_an_answer_to_another_question_is_refused() -> None:
    asked = Asked()
    with pytest.raises(TypeError, match="GetState was answered with Done"):
        asked.answer(0, Done())
    assert not asked.heard


def test_each_rank_is_heard_once() -> None:
    asked = Asked()
    state = RankState({}, count=0, current=True)
    for rank in (0, 0, 1, 2):
        asked.answer(rank, state)
    assert asked.heard == [(0, state), (1, state)]


def test_a_rank_that_dies_has_no_answer_and_one_that_is_dead_is_not_asked() -> None:
    asked = Asked()
    asked.inquiries.died(1, 1.0)
    assert [rank for rank, answer in asked.heard if isinstance(answer, NoAnswer)] == [1]
    assert asked.asked == [[0, 1]] and Asked(dead=[1]).asked == [[0]]


def test_what_answers_a_question_is_found_by_its_type() -> None:
    known: dict[Any, Any] = dict(
        [GetMemory.by(lambda question: ProcessMemory(1)), Inspect.by(lambda question: Inspection(None))]
    )
    assert known[GetMemory](GetMemory()) == ProcessMemory(1)
    assert known[Inspect](Inspect("x", 0)) == Inspection(None)
