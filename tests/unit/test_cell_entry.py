"""How cells get to their ranks: what they wait for, and how they are called off before they begin."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

import pytest

from nbdist.controller.cells.cell_entry import CellEntry
from nbdist.controller.cells.cell_transfers import CellTransfers
from nbdist.controller.cells.running_cells import Cells
from nbdist.controller.cells.waiting_cells import WaitingCells
from nbdist.wire import segments
from nbdist.wire.base.message import Message
from nbdist.wire.base.parcel import Parcel, Segment, Span
from nbdist.wire.base.rank_spans import RankSpans
from nbdist.wire.messages.cells import Execute, Interrupt, Remark, Reply
from nbdist.wire.messages.chunks import Arrived
from nbdist.wire.messages.life import Place, StartOptions
from nbdist.wire.questions.questions import Answer, Ask
from nbdist.wire.questions.stopping import GetState, GroupState, RankState
from tests.support.controller_parts import Sent, keep_busy, roster_of

TWO_NODES = {node: StartOptions(2, {}, "/", [], [], 0o022, 1024, place=Place(2 * node, 4, node, 2)) for node in (0, 1)}


def cell(serial: int, *ranks: int, parcel: Parcel | None = None) -> Execute:
    return Execute(serial, list(ranks), "cell", "pass", parcel=parcel)


def state(entered: int) -> RankState:
    """What a rank answers that is in one group with two others."""
    return RankState({"0": GroupState(RankSpans.of([0, 1, 2]), [entered], cut=False)}, count=1, current=True)


class Entry:
    """Where cells come to three ranks on one node, or to four on two."""

    def __init__(self, shares: dict[int, StartOptions] | None = None) -> None:
        self.sent = Sent()
        self.roster = roster_of(3, self.sent, shares)
        self.changing = False
        waiting = WaitingCells()
        self.cells = Cells(self.roster, self.sent, waiting, self._retry)
        self.transfers = CellTransfers(lambda node, message: None)
        self.entry = CellEntry(
            self.roster, self.sent, waiting, self.transfers, self.cells, lambda message: self.changing
        )

    def _retry(self) -> None:
        self.entry.retry()

    def fail_where_rank_2_is_silent(self) -> None:
        """Cell 5 fails on ranks 0 and 1. These answer where they are, rank 2 does not."""
        self.entry.begin(cell(5, 0, 1))
        keep_busy(self.roster)
        self.cells.ended(Reply(5, 0, "error"), time.monotonic())
        self.cells.ended(Reply(5, 1, "ok"), time.monotonic())
        asked = next(message for _, message in reversed(self.sent.sent) if isinstance(message, Ask))
        assert isinstance(asked.question, GetState)
        for rank in (0, 1):
            self.cells.answered(Answer(asked.request, rank, state(1 - rank), "controller"), time.monotonic())
        self.cells.tick(time.monotonic() + 1.1)

    def begun(self, serial: int) -> list[int]:
        """The ranks that have been sent a cell."""
        return [rank for rank, message in self.sent.sent if isinstance(message, Execute) and message.serial == serial]

    def told(self, kind: type[Message]) -> list[Message]:
        return [message for message in self.sent.told if isinstance(message, kind)]


@pytest.fixture
def value() -> Iterator[Segment]:
    descriptor = segments.create()
    os.write(descriptor, b"weights")
    segments.seal(descriptor)
    yield segments.segment_of(descriptor)
    os.close(descriptor)


def parcel_of(segment: Segment) -> Parcel:
    return Parcel("`w`", Span(0, segment.size), [], [], segments=[segment])


def test_a_cell_that_comes_while_ranks_are_replaced_begins_when_that_is_over() -> None:
    there = Entry()
    there.changing = True
    there.entry.begin(cell(6, 0, 1, 2))
    there.entry.admit_held()
    assert there.begun(6) == []
    there.changing = False
    there.entry.admit_held()
    assert there.begun(6) == [0, 1, 2]


def test_a_cell_whose_ranks_are_removed_while_it_waits_is_refused_and_others_go_on() -> None:
    there = Entry()
    there.changing = True
    there.entry.begin(cell(6, 1, 2))
    there.entry.begin(cell(7, 0))
    del there.roster.ranks[2]
    there.changing = False
    there.entry.admit_held()
    replies = [reply for reply in there.told(Reply) if isinstance(reply, Reply)]
    assert [(reply.serial, reply.rank, reply.status) for reply in replies] == [(6, 1, "error"), (6, 2, "error")]
    assert replies[0].failure is not None and "rank 2 was removed before the cell began" in replies[0].failure.text
    assert there.begun(6) == [] and there.begun(7) == [0]


def test_a_cell_that_waits_for_a_replacement_can_be_called_off() -> None:
    there = Entry()
    there.changing = True
    there.entry.begin(cell(6, 0, 1, 2))
    assert there.entry.stop(Interrupt(6, [0, 1, 2]))
    replies = there.told(Reply)
    assert [(reply.rank, reply.status) for reply in replies if isinstance(reply, Reply)] == [
        (0, "interrupted"),
        (1, "interrupted"),
        (2, "interrupted"),
    ]
    there.changing = False
    there.entry.admit_held()
    assert there.begun(6) == []


def test_a_cell_begins_once_its_values_are_on_the_other_node_and_finds_them_there(value: Segment) -> None:
    there = Entry(TWO_NODES)
    there.entry.begin(cell(6, 1, 2, parcel=parcel_of(value)))
    assert there.begun(6) == [] and not there.cells.quiet
    elsewhere = Segment(1, 2, 3, value.size)
    there.transfers.handle(1, Arrived(1, [elsewhere]))
    found = {rank: message.parcel for rank, message in there.sent.sent if isinstance(message, Execute)}
    assert {rank: parcel.segments for rank, parcel in found.items() if parcel is not None} == {
        1: [value],
        2: [elsewhere],
    }


def test_a_cell_that_is_called_off_on_its_way_does_not_begin_when_its_values_arrive(value: Segment) -> None:
    there = Entry(TWO_NODES)
    there.entry.begin(cell(6, 2, parcel=parcel_of(value)))
    assert there.entry.stop(Interrupt(6, [2]))
    there.transfers.handle(1, Arrived(1, [Segment(1, 2, 3, value.size)]))
    assert there.begun(6) == [] and there.cells.quiet and not there.transfers.parcels(6)


def test_what_a_cell_waits_for_is_said_every_second() -> None:
    there = Entry()
    there.fail_where_rank_2_is_silent()
    there.entry.begin(cell(6, 0, 1, 2))
    now = time.monotonic()
    there.entry.tick(now + 1.1)
    there.entry.tick(now + 2.2)
    first, second = [remark for remark in there.told(Remark) if isinstance(remark, Remark)]
    assert first.text == (
        "waiting for rank 2, which has not answered for 1 s: stopped, or in a call that blocks Python. "
        "Interrupt this cell to cancel it."
    )
    assert (first.same, second.same) == (False, True) and "for 2 s" in second.text


def test_an_interrupt_of_some_of_its_ranks_leaves_the_cell_to_the_others() -> None:
    there = Entry()
    there.fail_where_rank_2_is_silent()
    there.entry.begin(cell(6, 1, 2))
    assert there.entry.stop(Interrupt(6, [2]))
    reply = there.told(Reply)[-1]
    assert isinstance(reply, Reply) and reply.failure is not None
    assert (reply.serial, reply.rank, reply.status) == (6, 2, "interrupted")
    assert reply.failure.text == "the cell had not started: it was waiting for rank 2"
    assert there.entry.stop(Interrupt(6, [1])) and not there.entry.stop(Interrupt(6, [1]))
