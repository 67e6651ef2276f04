"""What has run on a set of ranks: the cells that a newcomer may have to run before it can take part."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

import msgspec

from nbdist.wire.messages.cells import Execute
from nbdist.wire.messages.healing import SetupCell

_LARGEST = 4 << 20  # characters of code; what was marked as a setup cell is kept beyond it


class CellHistory:
    """Cells in the order in which they ran last. The same code counts once."""

    def __init__(self) -> None:
        self._cells: dict[tuple[str, bool], SetupCell] = {}
        self._size = 0  # of those that are not marked

    @property
    def cells(self) -> list[SetupCell]:
        """All of them."""
        return list(self._cells.values())

    @property
    def marked(self) -> list[int]:
        """The numbers of those that were marked for newcomers."""
        return [cell.number for cell in self._cells.values() if cell.marked]

    def add(self, message: Execute) -> None:
        """Note that a cell begins. What is not a cell is passed over."""
        if message.kind != "cell":
            return
        key = message.code, message.setup
        known = self._cells.pop(key, None)
        ranks = sorted({*message.ranks, *(known.ranks if known is not None else ())})
        self._cells[key] = SetupCell(message.code, message.number, message.offset, message.setup, ranks)
        if not message.setup:
            self._size += len(message.code) if known is None else 0
            self._shorten()

    def renumber(self, numbers: Mapping[int, int]) -> None:
        """Note that ranks have other numbers; those without one are gone."""
        for key, cell in self._cells.items():
            ranks = sorted(numbers[rank] for rank in cell.ranks if rank in numbers)
            self._cells[key] = msgspec.structs.replace(cell, ranks=ranks)

    def include(self, newcomers: Iterable[int], others: Collection[int]) -> None:
        """Note that ranks have come which have run what all others had: to the next ones, they are like these."""
        for key, cell in self._cells.items():
            if set(cell.ranks).issuperset(others):
                self._cells[key] = msgspec.structs.replace(cell, ranks=sorted({*cell.ranks, *newcomers}))

    def _shorten(self) -> None:
        while self._size > _LARGEST:
            oldest = next(key for key, cell in self._cells.items() if not cell.marked)
            self._size -= len(self._cells.pop(oldest).code)
