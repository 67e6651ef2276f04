"""Which cells wait for what between cells: what ranks are asked and told, given what they answer at which time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from nbdist.controller.base.inquiries import A, Handler
from nbdist.controller.cells.recovery import FailedCell
from nbdist.controller.cells.repairs import Repairs
from nbdist.controller.cells.waiting_cells import WaitingCell, WaitingCells
from nbdist.wire.base.message import Message
from nbdist.wire.base.rank_spans import RankSpans
from nbdist.wire.messages.cells import Execute, InOrder, Recover, Recovered, Remark, Reply
from nbdist.wire.questions.question import Question
from nbdist.wire.questions.stopping import Forbid, Forbidden, GetState, GroupState, RankState
from tests.support.controller_parts import Sent, keep_busy, roster_of

NOTHING = Forbidden({})


def state(entered: int = 0, *, cut: bool = False, current: bool = True) -> RankState:
    """What a rank answers that is in one group with two others."""
    return RankState({"0": GroupState(RankSpans.of([0, 1, 2]), [entered], cut)}, count=1, current=current)


def cell(serial: int, *ranks: int) -> Execute:
    return Execute(serial, list(ranks), "cell", "pass")


class Ranks:
    """Three ranks, and what becomes of cells on them."""

    def __init__(self) -> None:
        self.now = 100.0
        self.asked: list[tuple[type[Question[Any]], list[int], Handler[Any]]] = []
        self.sent = Sent()
        self.roster = roster_of(3, self.sent)
        self.begun: list[Execute] = []
        self.waiting = WaitingCells()
        self.repairs = Repairs(self.roster, self.sent, self._ask, self.waiting, self._retry)

    def _ask(self, ranks: Sequence[int], question: Question[A], handler: Handler[A] | None = None) -> None:
        assert handler is not None
        self.asked.append((type(question), list(ranks), handler))

    @property
    def recovering(self) -> dict[int, Recover]:
        """The last orders of each rank."""
        return {rank: message for rank, message in self.sent.sent if isinstance(message, Recover)}

    def begin(self, message: Execute) -> None:
        self._try(self.waiting.add(message))

    def _retry(self) -> None:
        for cell in self.waiting.for_reason("repairs"):
            self._try(cell)

    def _try(self, cell: WaitingCell) -> None:
        cell.reason = "repairs"
        if self.repairs.must_wait(cell, self.now):
            cell.wait_for_repairs(self.now)
        else:
            self.waiting.remove(cell)
            self.begun.append(cell.message)

    def fail(self, *ranks: int) -> None:
        """Cell 5 on these ranks has failed on the first."""
        self.repairs.add(FailedCell(5, list(ranks), {ranks[0]}), Reply(5, ranks[0], "error"))
        self.repairs.go_on(self.now)

    def answer(self, question: type[Question[A]], **answers: A) -> None:
        """Ranks answer the last such question: rank_1=..."""
        handler = next(handler for asked, _, handler in reversed(self.asked) if asked is question)
        for name, data in answers.items():
            handler(int(name.removeprefix("rank_")), data, self.now)
        self.repairs.go_on(self.now)

    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        self.repairs.tick(self.now)

    def put_in_order(self, *ranks: int, failure: str = "") -> None:
        for rank in ranks:
            self.repairs.in_order(rank, InOrder(failure))
        self.repairs.go_on(self.now)

    def notes(self, kind: type[Message]) -> list[Any]:
        return [message for message in self.sent.told if isinstance(message, kind)]


def ranks_that_owe() -> Ranks:
    """Rank 2 was busy when a cell failed that had entered a collective of all; it is idle again."""
    ranks = Ranks()
    keep_busy(ranks.roster, 2)
    ranks.fail(0, 1)
    ranks.answer(GetState, rank_0=state(1), rank_1=state(0))
    keep_busy(ranks.roster)
    return ranks


def test_no_cell_begins_on_a_rank_that_does_not_know_yet_which_groups_it_must_not_use() -> None:
    ranks = ranks_that_owe()
    assert ranks.asked[-1][:2] == (Forbid, [0, 1, 2])
    ranks.begin(cell(6, 0))
    assert not ranks.begun
    ranks.answer(Forbid, rank_0=NOTHING)
    assert [message.serial for message in ranks.begun] == [6]


def test_owed_groups_are_renewed_before_the_next_cell_which_says_so() -> None:
    ranks = ranks_that_owe()
    ranks.answer(Forbid, rank_0=NOTHING, rank_1=NOTHING, rank_2=NOTHING)
    ranks.begin(cell(6, 0))
    cut = state(cut=True, current=False)
    ranks.answer(GetState, rank_0=cut, rank_1=cut, rank_2=cut)
    assert ranks.recovering.keys() == {0, 1, 2} and ranks.recovering[0].renew == ["0"] and not ranks.begun
    ranks.put_in_order(0, 1, 2)
    assert [message.serial for message in ranks.begun] == [6]
    assert [(note.serial, note.text) for note in ranks.notes(Remark)] == [(6, "process groups rebuilt (generation 2)")]
    assert ranks.notes(Recovered)[-1].generation == 2
    ranks.begin(cell(7, 0))
    assert [message.serial for message in ranks.begun] == [6, 7]


def test_a_renewal_that_fails_is_tried_again_for_the_next_cell_only() -> None:
    ranks = ranks_that_owe()
    ranks.answer(Forbid, rank_0=NOTHING, rank_1=NOTHING, rank_2=NOTHING)
    cut = state(cut=True, current=False)
    for serial in (6, 7):
        ranks.begin(cell(serial, 0, 1, 2))
        ranks.answer(GetState, rank_0=cut, rank_1=cut, rank_2=cut)
        ranks.put_in_order(0, 1, 2, failure="RuntimeError: no store")
        assert "could not be renewed" in ranks.notes(Remark)[-1].text
        ranks.answer(Forbid, rank_0=NOTHING, rank_1=NOTHING, rank_2=NOTHING)
        assert ranks.begun[-1].serial == serial


def test_a_rank_that_did_not_come_to_a_renewal_begins_nothing_until_it_has() -> None:
    ranks = Ranks()
    ranks.fail(0, 1, 2)
    ranks.answer(GetState, rank_0=state(1), rank_1=state(0), rank_2=state(0))
    ranks.put_in_order(0, 1)
    ranks.pass_time(16)
    ranks.answer(Forbid, rank_0=NOTHING, rank_1=NOTHING, rank_2=NOTHING)
    ranks.begin(cell(6, 0))
    ranks.begin(cell(7, 2))
    assert [message.serial for message in ranks.begun] == [6]
    ranks.put_in_order(2, failure="RuntimeError: the others have gone")
    cut = state(cut=True, current=False)
    ranks.answer(GetState, rank_0=cut, rank_1=cut, rank_2=cut)
    ranks.put_in_order(0, 1, 2)
    assert [message.serial for message in ranks.begun] == [6, 7]


def test_an_interrupt_of_a_failed_cell_does_not_wait_for_its_recovery() -> None:
    ranks = Ranks()
    ranks.fail(0, 1)
    ranks.repairs.let_end(5)
    assert ranks.notes(Reply)[-1].serial == 5


def test_an_answer_that_belongs_to_an_earlier_recovery_is_not_taken_for_one_to_the_next() -> None:
    ranks = Ranks()
    ranks.fail(0, 1, 2)
    ranks.answer(GetState, rank_0=state(1), rank_1=state(0))
    ranks.pass_time(1.1)
    late = ranks.asked[0][2]
    ranks.fail(0, 1)
    late(2, state(1), ranks.now)
    ranks.repairs.go_on(ranks.now)
    assert [question for question, _, _ in ranks.asked] == [GetState, Forbid, Forbid, GetState]
    assert not ranks.recovering
