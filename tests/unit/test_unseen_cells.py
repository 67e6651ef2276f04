"""What a client that attaches is given: the cells whose end its predecessor may not have seen."""

from __future__ import annotations

import pytest

from nbdist.client.start.farewell import linger_or_default
from nbdist.controller.clients.unseen_cells import EndedCells, UnseenCells
from nbdist.errors import UsageError
from nbdist.wire.base.parcel import Parcel, Span
from nbdist.wire.messages.cells import Execute, Kind, Reply
from nbdist.wire.messages.output import Notice


def begin(cells: UnseenCells, serial: int, ranks: list[int], kind: Kind = "cell") -> None:
    cells.begin(Execute(serial, ranks, kind, "code", serial * 10))


def test_a_cell_is_given_until_its_client_uses_the_ranks_again() -> None:
    cells = UnseenCells(EndedCells())
    begin(cells, 1, [0, 1])
    cells.note(Reply(1, 0, "ok", names=["x"]), True)
    begin(cells, 2, [2])
    assert [cell.serial for cell in cells.report({})] == [1, 2]
    cells.note(Reply(1, 1, "error"), False)
    [first, second] = cells.report({})
    assert not first.watched and [end.rank for end in first.ends if isinstance(end, Reply)] == [0, 1]
    assert second.watched and second.ends == [] and cells.names == {0: ["x"]}
    begin(cells, 3, [1])
    assert [cell.serial for cell in cells.report({})] == [2, 3] and cells.last == 30


def test_values_that_nobody_has_taken_are_to_be_freed_once_and_not_passed_on() -> None:
    cells = UnseenCells(EndedCells())
    for serial in (1, 2):
        begin(cells, serial, [serial], "pull")
        cells.note(Reply(serial, serial, "ok", parcel=Parcel("x", Span(0, 0), [], [])), True)
    cells.released(1)
    assert cells.take_lent() == {2: {2}} and cells.take_lent() == {}
    assert cells.report({}) == []  # a value is no news


def test_lines_are_kept_only_while_nobody_is_there() -> None:
    cells = UnseenCells(EndedCells())
    cells.note(Notice("seen"), True)
    cells.note(Notice("not seen"), False)
    assert cells.notices == ["not seen"]


def test_the_default_of_linger_can_be_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NBDIST_LINGER", "2h")
    assert linger_or_default(None) == 7200 and linger_or_default(3.0) == 3
    monkeypatch.setenv("NBDIST_LINGER", "soon")
    with pytest.raises(UsageError, match="NBDIST_LINGER='soon' is not a duration"):
        linger_or_default(None)
    monkeypatch.delenv("NBDIST_LINGER")
    assert linger_or_default(None) == 0  # a script's ranks end with it
