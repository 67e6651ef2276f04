"""The cells that a rank which replaces another may have to run."""

from __future__ import annotations

from nbdist.controller.cells.cell_history import CellHistory
from nbdist.wire.messages.cells import Execute, Kind


def cell(code: str, ranks: list[int], *, number: int = 1, setup: bool = False, kind: Kind = "cell") -> Execute:
    return Execute(1, ranks, kind, code, number, setup=setup)


def test_cells_are_kept_in_the_order_in_which_they_ran_last() -> None:
    history = CellHistory()
    for number, code in enumerate(("a", "b", "a"), start=1):
        history.add(cell(code, [0, 1], number=number))
    assert [(each.code, each.number) for each in history.cells] == [("b", 2), ("a", 3)]


def test_a_cell_belongs_to_all_ranks_that_it_ran_on() -> None:
    history = CellHistory()
    history.add(cell("a", [0]))
    history.add(cell("a", [2]))
    assert [each.ranks for each in history.cells] == [[0, 2]]


def test_only_cells_are_kept() -> None:
    history = CellHistory()
    history.add(cell("train", [0], kind="call"))
    assert history.cells == []


def test_old_cells_make_room_but_not_those_that_are_marked() -> None:
    history = CellHistory()
    history.add(cell("marked", [0], setup=True))
    for number in range(6):
        history.add(cell(f"{number}" + "#" * (1 << 20), [0]))
    assert [each.code[:1] for each in history.cells] == ["m", "3", "4", "5"]
