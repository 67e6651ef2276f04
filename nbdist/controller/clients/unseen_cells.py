"""The cells whose end the client may not have seen: what one that attaches is given. Pure.

A cell is kept until its client begins another one on its ranks, which it does only once it knows of the end.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from nbdist.wire.base.message import Message
from nbdist.wire.messages.cells import Execute, Recovered, Reply
from nbdist.wire.messages.handover import UnseenCell
from nbdist.wire.messages.life import Died
from nbdist.wire.messages.output import Notice, Output
from nbdist.wire.messages.visitor_messages import FollowedCell

_KEPT = 100


class EndedCells:
    """Cells in the order of their ends, counted from the session's start."""

    def __init__(self) -> None:
        self._cells: deque[FollowedCell] = deque(maxlen=_KEPT)
        self.count = 0

    def add(self, cell: FollowedCell) -> None:
        """Note that a cell has ended."""
        self._cells.append(cell)
        self.count += 1

    def since(self, seen: int) -> tuple[list[FollowedCell], int]:
        """Return the cells that have ended after the first `seen`, and how many of them are not kept any more."""
        first = self.count - len(self._cells)
        return list(self._cells)[max(0, seen - first) :], max(0, first - seen)


_NOTICES = 100  # lines that are kept for the next client


@dataclass
class _Cell:
    execute: Execute
    left: set[int]
    began: float = field(default_factory=time.monotonic)
    ends: list[Reply | Died | Recovered] = field(default_factory=list)
    watched: bool = True


class UnseenCells:
    """What has run on one set of ranks and was not seen.

    Args:
        ended: Is given each cell that ends.

    Attributes:
        names: The variables on each rank, as far as replies have brought them.
        last: The number of the cell that began last.
        notices: Lines that came while nobody was there.
    """

    def __init__(self, ended: EndedCells) -> None:
        self._ended = ended
        self._cells: dict[int, _Cell] = {}
        self._lent: dict[int, set[int]] = {}  # by cell, the ranks that hold a value for the client
        self.names: dict[int, list[str]] = {}
        self.last = 0
        self.notices: list[str] = []

    @property
    def launches(self) -> bool:
        """Whether the ranks belong to a launched function."""
        return any(cell.execute.kind == "launch" for cell in self._cells.values())

    @property
    def serials(self) -> list[int]:
        """The cells."""
        return list(self._cells)

    def begin(self, message: Execute) -> None:
        """Note that a cell begins."""
        ranks = set(message.ranks)
        for serial in [each for each, cell in self._cells.items() if not cell.left and ranks & set(cell.execute.ranks)]:
            del self._cells[serial]
        self._cells[message.serial] = _Cell(msgspec.structs.replace(message, parcel=None), ranks)
        if message.kind == "cell":
            self.last = message.number

    def note(self, message: Message, watched: bool) -> None:
        """Note what the client is sent, or would be if there were one.

        Args:
            message: The message.
            watched: Whether there is a client.
        """
        if isinstance(message, Reply | Died | Recovered):
            end = self._note_reply(message) if isinstance(message, Reply) else message
            if (cell := self._cells.get(message.serial)) is None:
                return
            cell.ends.append(end)
            if not isinstance(message, Recovered):
                cell.left.discard(message.rank)
                cell.watched = watched
                if not cell.left:
                    self._ended.add(_followed(cell))
        elif isinstance(message, Notice) and not watched and len(self.notices) < _NOTICES:
            self.notices.append(message.text)

    def _note_reply(self, reply: Reply) -> Reply:
        """Return what is kept of a reply: not the value, which only its client wanted."""
        if reply.names is not None:
            self.names[reply.rank] = reply.names
        if reply.parcel is None:
            return reply
        self._lent.setdefault(reply.serial, set()).add(reply.rank)
        return msgspec.structs.replace(reply, parcel=None)

    def renumber(self, numbers: Mapping[int, int]) -> None:
        """Note that ranks have other numbers; those without one are gone."""
        self.names = {numbers[rank]: names for rank, names in self.names.items() if rank in numbers}
        self._lent.clear()

    def released(self, serial: int) -> None:
        """Note that the client has taken what ranks held for it."""
        self._lent.pop(serial, None)

    def take_lent(self) -> dict[int, set[int]]:
        """Return the ranks that hold values which nobody wants any more, by cell, once."""
        lent, self._lent = self._lent, {}
        return lent

    def running(self) -> list[FollowedCell]:
        """Return what runs, the oldest first."""
        return [_followed(cell) for cell in self._cells.values() if cell.left]

    def report(self, printed: Mapping[int, tuple[int, Sequence[Output]]]) -> list[UnseenCell]:
        """Return the cells, the oldest first.

        Args:
            printed: By cell, how many bytes it has printed, and the newest of them.
        """
        now = time.monotonic()
        return [
            UnseenCell(
                serial,
                cell.execute.kind,
                cell.execute.code,
                cell.execute.number,
                cell.execute.ranks,
                now - cell.began,
                cell.ends,
                printed.get(serial, (0, ()))[0],
                list(printed.get(serial, (0, ()))[1]),
                cell.watched,
            )
            for serial, cell in self._cells.items()
            if cell.left or cell.execute.kind in ("cell", "call")
        ]


def _followed(cell: _Cell) -> FollowedCell:
    execute = cell.execute
    ends = [end for end in cell.ends if not isinstance(end, Recovered)] if not cell.left else []
    seconds = time.monotonic() - cell.began
    return FollowedCell(execute.serial, execute.kind, execute.code, execute.number, execute.ranks, seconds, ends)
