"""What the notebook owes is known to the byte, and paid once."""

from __future__ import annotations

from nbdist.controller.clients.client_side import Ledger
from nbdist.wire.messages.output import STDOUT, Credit, Display, Notice, Output, WidgetMessage


def test_what_was_passed_on_and_not_paid_is_settled_by_rank_and_kind() -> None:
    ledger = Ledger()
    ledger.passed_on(Output(0, STDOUT, b"12345"))
    ledger.passed_on(Output(1, STDOUT, b"123"))
    ledger.passed_on(Display(1, 1, "display", {}, {}, size=700))
    ledger.passed_on(WidgetMessage(1, "comm_msg", "x", "", {}, {}, [], size=70))
    ledger.paid(Credit(0, 2))
    ledger.paid(Credit(1, 3))
    assert sorted(ledger.settle(), key=lambda credit: credit.rank) == [Credit(0, 3), Credit(1, 770, items=True)]


def test_what_is_settled_is_owed_no_more() -> None:
    ledger = Ledger()
    ledger.passed_on(Output(0, STDOUT, b"12345"))
    ledger.settle()
    assert ledger.settle() == []


def test_what_costs_nothing_is_not_owed() -> None:
    ledger = Ledger()
    ledger.passed_on(Notice("a line"))
    assert ledger.settle() == []
