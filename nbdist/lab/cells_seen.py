"""The notebook's cells that ran on ranks: which they are, where, what failed, each rank's bars, and its steps.

Kept from the moment nbdist is loaded, as a page may come later. Independent of messages.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field, replace
from typing import Protocol

from nbdist import shells
from nbdist.client.output.page import OwnBars
from nbdist.client.ranks.observers import Observer
from nbdist.client.ranks.task_record import TaskRecord
from nbdist.errors import RankFailure, UsageError
from nbdist.metrics.node.sample import Sample

_CELLS = 1000  # that are kept
_LARGEST = 8_000_000  # characters of what failed, and of bars, that are kept, about
_BAR = 100  # characters, about


@dataclass
class CellSeen:
    """A cell that runs or has run on ranks.

    Attributes:
        id: The front end's name for it; empty: it has given none.
        number: In the notebook.
        ranks: Where it ran.
        failures: What went wrong, by rank.
        bars: The ranks' own progress bars, by the lines that stand for those of several.
    """

    id: str
    number: int
    ranks: set[int] = field(default_factory=set)
    failures: dict[int, RankFailure] = field(default_factory=dict)
    bars: OwnBars = field(default_factory=dict)

    @property
    def failed(self) -> list[int]:
        """The ranks that failed by themselves, and not because of another one or of the user."""
        return [rank for rank, each in self.failures.items() if each.kind != "interrupted" and not each.lost_peer]

    @property
    def size(self) -> int:
        """Characters that are kept of it, about."""
        failed = sum(len(failure.text) + len(failure.traceback) for failure in self.failures.values())
        return failed + _BAR * len(self.bars) * len(self.ranks)


class Reader(Protocol):
    """A page that shows cells."""

    def cells(self, cells: list[CellSeen]) -> None:
        """Hear of cells that have begun or ended."""

    def bars(self, name: str, rank: int, bars: dict[str, str], whole: bool) -> None:
        """Hear of a rank's own bars in the cell of this id, by the lines that stand for them; whole: these are all."""


class CellsSeen(Observer):
    """Remembers them, and tells pages when a cell begins or ends, and of the bars of ranks that they look at."""

    def __init__(self) -> None:
        self._cells: dict[int, CellSeen] = {}  # by number, in the order in which they began
        self._readers: dict[str, Reader] = {}  # by page
        self._looks: dict[tuple[str, str], int] = {}  # ranks, by page and cell

    def subscribe(self, page: str, reader: Reader) -> Callable[[], None]:
        """Tell a page of all cells now, and of each that begins or ends. Returns what ends that."""
        self._readers[page] = reader
        reader.cells(list(self._cells.values()))

        def unsubscribe() -> None:
            if self._readers.get(page) is reader:
                del self._readers[page]
                self._looks = {key: rank for key, rank in list(self._looks.items()) if key[0] != page}

        return unsubscribe

    def look(self, page: str, name: str, rank: int | None) -> None:
        """Tell a page of the bars of this rank in the cell of this id from now on; None: of none."""
        self._looks.pop((page, name), None)
        if rank is None or not name:
            return
        self._looks[page, name] = rank
        runs = [seen for seen in list(self._cells.values()) if seen.id == name]
        own = _own(runs[-1].bars, list(runs[-1].bars), rank) if runs else {}
        if own and page in self._readers:
            self._readers[page].bars(name, rank, own, True)

    def bars_drawn(self, number: int, bars: OwnBars, lines: list[str]) -> None:
        """Note them."""
        seen = self._cells.get(number)
        if seen is None:
            return
        seen.bars = bars
        for (page, name), rank in list(self._looks.items()):
            if name == seen.id and (reader := self._readers.get(page)) and (own := _own(bars, lines, rank)):
                reader.bars(name, rank, own, False)

    def cell_began(self, task: TaskRecord) -> None:
        """Note where it runs. A cell of the kernel may run code on ranks several times."""
        if task.kind not in ("cell", "call") or not task.number:
            return
        name = shells.cell_id() if task.number == shells.cell_number() else ""
        seen = self._cells.get(task.number)
        if seen is None or seen.id != name:
            seen = self._cells[task.number] = CellSeen(name, task.number)
        seen.ranks.update(task.ranks)
        self._forget_oldest()
        self._tell(seen)

    def cell_ended(self, task: TaskRecord) -> None:
        """Note what failed."""
        seen = self._cells.get(task.number)
        if seen is None:
            return
        if seen.bars or task.failures:
            self._forget_oldest_texts()
        if not task.failures:
            return
        seen.failures.update({rank: replace(failure, pickled=None) for rank, failure in task.failures.items()})
        self._tell(seen)

    def failure(self, number: int, rank: int) -> RankFailure | None:
        """Return what went wrong on a rank in a cell."""
        seen = self._cells.get(number)
        return None if seen is None else seen.failures.get(rank)

    def find(self, name: str, number: int, code: str) -> tuple[int, str]:
        """Return the number in this kernel of a cell of a page, and what is to be said if it may be another one.

        Args:
            name: Its id; empty: it has none.
            number: As the page has it, perhaps of an earlier kernel; 0: the page does not know it.
            code: Its text as the page has it.

        Raises:
            UsageError: This kernel has not run it.
        """
        if number:
            return number, self._doubt(name, number, code)
        mine = [seen.number for seen in list(self._cells.values()) if name and seen.id == name]
        if mine:
            return mine[-1], self._doubt(name, mine[-1], code)
        newest = shells.newest_cell(code)
        if not newest:
            raise UsageError(
                "this kernel has not run this cell, so its number is not known here: "
                "`%distributed logs --cell N` shows the log of any cell of the session"
            )
        return newest, f"it is not known which run of the code above this is. Cell {newest} is the newest."

    def _doubt(self, name: str, number: int, code: str) -> str:
        ran = shells.code_of_cell(number).rstrip()
        seen = self._cells.get(number)
        if ran and ran != code.rstrip():
            return f"cell {number} ran different code in this kernel than the code above."
        if ran and seen is not None and name and seen.id and seen.id != name:
            return f"cell {number} of this kernel is another cell of the notebook, with the same code."
        return ""

    def _tell(self, seen: CellSeen) -> None:
        for reader in list(self._readers.values()):
            reader.cells([seen])

    def _forget_oldest(self) -> None:
        while len(self._cells) > _CELLS:
            del self._cells[next(iter(self._cells))]

    def _forget_oldest_texts(self) -> None:
        held = 0
        for seen in reversed(list(self._cells.values())):  # threads of background cells come here, too
            if held > _LARGEST:
                seen.failures, seen.bars = {}, {}
            held += seen.size


def _own(bars: OwnBars, lines: Iterable[str], rank: int) -> dict[str, str]:
    """Return a rank's own bars, by these lines."""
    return {line: own for line in lines if (own := bars.get(line, {}).get(rank)) is not None}


class CellStepsSeen(Observer):
    """How far the training loop of the running cell has come on each rank, by the samples that something else takes.

    A page that shows the panel has ranks sampled, and so does a recorded history; this asks no rank.
    """

    def __init__(self) -> None:
        self._cell = 0
        self._steps: dict[int, int] = {}

    def ranks_looked_at(self, sample: Sample) -> None:
        """Note them."""
        known = {rank.rank: rank.step.in_cell for rank in sample.ranks if rank.step is not None}
        self._cell, self._steps = sample.cell, known

    def of(self, cell: int, ranks: Collection[int]) -> int:
        """Return the step up to which all of these ranks have come in their cell; 0 if that is not known."""
        if cell != self._cell:
            return 0
        return min((self._steps.get(rank, 0) for rank in ranks), default=0)
