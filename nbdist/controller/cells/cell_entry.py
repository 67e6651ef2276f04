"""How a cell gets to its ranks: with what it takes along, which ranks on other machines must be able to reach."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Protocol

import msgspec

from nbdist.controller.base.rank_order import Rank
from nbdist.controller.cells.cell_transfers import CellTransfers
from nbdist.controller.cells.running_cells import Cells
from nbdist.controller.nodes.placement import Placement
from nbdist.wire.base.message import Message
from nbdist.wire.lanes import RANK_CELL
from nbdist.wire.messages.cells import Execute, Failure, FailureKind, Outcome, Reply


class Destination(Protocol):
    """What the set of ranks does for this module."""

    ranks: dict[int, Rank]
    where: Placement
    transfers: CellTransfers
    cells: Cells

    def to_ranks(self, name: str, ranks: Sequence[int], message: Message) -> None:
        """Send the same to ranks."""

    def to_notebook(self, message: Message) -> None:
        """Send to the notebook."""


class CellEntry:
    """Sends cells out.

    Args:
        there: The set of ranks.
    """

    def __init__(self, there: Destination) -> None:
        self._there = there

    def begin(self, message: Execute) -> None:
        """Run something on ranks, once all of them can reach what it takes along."""
        ranks = self._there.ranks
        if not message.ranks or not ranks.keys() >= set(message.ranks):
            raise ValueError(f"there are no ranks {message.ranks}")
        elsewhere = {self._there.where.node_of(rank) for rank in message.ranks if not ranks[rank].dead} - {0}
        if message.parcel is None or not message.parcel.segments or not elsewhere:
            self.execute(message)
        else:
            self._there.transfers.deliver(message, elsewhere, self._delivered)

    def _delivered(self, message: Execute, why: str) -> None:
        if why:
            self._refuse(message, "error", "TransferError", why)
        else:
            self.execute(message)

    def withdraw(self, serial: int) -> bool:
        """Call a cell off that waits for what it takes along. Return whether there was one."""
        waiting = self._there.transfers.withdraw(serial)
        if waiting is not None:
            self.call_off(waiting)
        return waiting is not None

    def call_off(self, message: Execute) -> None:
        """Report for all ranks of a cell that it was interrupted before it began."""
        self._refuse(message, "interrupted", "KeyboardInterrupt", "it was interrupted before it began")

    def _refuse(self, message: Execute, status: Outcome, name: str, text: str) -> None:
        self._there.transfers.drop(message.serial)
        kind: FailureKind = "interrupted" if status == "interrupted" else "raised"
        failure = Failure(name, text, "", time.monotonic(), kind=kind)
        for rank in message.ranks:
            self._there.to_notebook(Reply(message.serial, rank, status, failure))

    def execute(self, message: Execute) -> None:
        """Run something on ranks. To be called again when they are in order, if they are not."""
        now = time.monotonic()
        if not self._there.cells.begin(message, now):
            return
        living = []
        for number in message.ranks:
            rank = self._there.ranks[number]
            if rank.dead:  # the notebook did not know yet
                self._there.cells.died(msgspec.structs.replace(rank.dead, serial=message.serial), now)
                continue
            rank.begin(message.serial, message.number)
            living.append(number)
        self._send_out(message, living)

    def _send_out(self, message: Execute, ranks: Sequence[int]) -> None:
        """Send a cell to its ranks, with the parcel as each node has it."""
        parcels = self._there.transfers.parcels(message.serial)
        node_of = self._there.where.node_of
        for node, parcel in parcels.items():
            there = [rank for rank in ranks if node_of(rank) == node]
            self._there.to_ranks(RANK_CELL, there, msgspec.structs.replace(message, parcel=parcel))
        self._there.to_ranks(RANK_CELL, [rank for rank in ranks if node_of(rank) not in parcels], message)
