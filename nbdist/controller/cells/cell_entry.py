"""How a cell gets to its ranks: what it waits for, what it takes along, and how it is called off before it begins."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import msgspec

from nbdist.base.ranks import describe_ranks
from nbdist.controller.base.outbox import Outbox
from nbdist.controller.cells.cell_transfers import CellTransfers
from nbdist.controller.cells.running_cells import Cells
from nbdist.controller.cells.waiting_cells import WaitingCell, WaitingCells
from nbdist.controller.nodes.roster import Roster
from nbdist.wire.lanes import RANK_CELL
from nbdist.wire.messages.cells import Execute, Failure, FailureKind, Interrupt, Outcome, Remark, Reply


class CellEntry:
    """Sends cells out.

    Args:
        roster: The ranks.
        outbox: Sends to them.
        waiting: Cells that have not begun.
        transfers: Brings what cells take along to other nodes.
        cells: What runs.
        held: Says whether a cell has to wait for the end of a change of the ranks; called until it has not to.
    """

    def __init__(
        self,
        roster: Roster,
        outbox: Outbox,
        waiting: WaitingCells,
        transfers: CellTransfers,
        cells: Cells,
        held: Callable[[Execute], bool],
    ) -> None:
        self._roster = roster
        self._outbox = outbox
        self._waiting = waiting
        self._transfers = transfers
        self._cells = cells
        self._held = held

    # --- what a cell waits for

    def begin(self, message: Execute) -> None:
        """Run something on ranks, as soon as nothing holds it up."""
        if not message.ranks or not self._roster.ranks.keys() >= set(message.ranks):
            raise ValueError(f"there are no ranks {message.ranks}")
        self._admit(self._waiting.add(message))

    def admit_held(self) -> None:
        """Go on with cells that waited for a change of the ranks, if it is over."""
        for cell in self._waiting.for_reason("change"):
            self._admit(cell)

    def _admit(self, cell: WaitingCell) -> None:
        if self._held(cell.message):
            return
        message, ranks = cell.message, self._roster.ranks
        if gone := sorted(set(message.ranks) - ranks.keys()):  # the change has removed them
            verb = "was" if len(gone) == 1 else "were"
            text = f"{describe_ranks(gone)} {verb} removed before the cell began: run it again on the other ranks"
            self._refuse(cell, "error", "RankError", text)
            return
        cell.reason = "values"
        elsewhere = {self._roster.where.node_of(rank) for rank in message.ranks if not ranks[rank].dead} - {0}
        if message.parcel is None or not message.parcel.segments or not elsewhere:
            self._try(cell)
        else:
            self._transfers.deliver(message, elsewhere, self._delivered)

    def _delivered(self, message: Execute, why: str) -> None:
        cell = self._waiting.get(message.serial)
        if cell is None:  # it was called off
            return
        if why:
            self._refuse(cell, "error", "TransferError", why)
        else:
            self._try(cell)

    def retry(self) -> None:
        """Go on with cells that waited for repairs, as far as their ranks are in order."""
        for cell in self._waiting.for_reason("repairs"):  # each may end the wait of others, or cause a death
            self._try(cell)

    def _try(self, cell: WaitingCell) -> None:
        cell.reason, now = "repairs", time.monotonic()
        if not self._cells.begin(cell, now):
            cell.wait_for_repairs(now)
            return
        self._waiting.remove(cell)
        if cell.said and cell.since is not None:
            text = f"waited {now - cell.since:.0f} s for a rank to answer, then started"
            self._outbox.to_notebook(Remark(cell.serial, text, "watch"))
        self._send_out(cell.message, now)

    # --- the wait for repairs

    def due(self) -> float | None:
        """Return the time of the next `tick`."""
        return min((cell.due for cell in self._waiting.repaired_for()), default=None)

    def tick(self, now: float) -> None:
        """Try again cells that have waited for long, and report which ranks they wait for."""
        due = self.due()
        if due is None or now < due:
            return
        self._cells.go_on(now)
        for cell in self._waiting.repaired_for():
            if now >= cell.due:
                self._explain_wait(cell, now)

    def _explain_wait(self, cell: WaitingCell, now: float) -> None:
        cell.put_off(now)
        who = self._cells.awaited(cell.message)
        if not who or cell.since is None:
            return
        has = "has" if len(who) == 1 else "have"
        text = (
            f"waiting for {self._roster.names.describe(who)}, which {has} not answered for "
            f"{now - cell.since:.0f} s: stopped, or in a call that blocks Python. Interrupt this cell to cancel it."
        )
        self._outbox.to_notebook(Remark(cell.serial, text, "watch", same=cell.said))
        cell.said = True

    # --- cells that are called off

    def stop(self, message: Interrupt) -> bool:
        """Call a cell off that has not begun. Returns whether there was one."""
        cell = self._waiting.get(message.serial)
        if cell is None:
            return False
        if cell.reason == "repairs":
            self._call_off_waiting(cell, message.ranks, time.monotonic())
        else:
            self._refuse(cell, "interrupted", "KeyboardInterrupt", "it was interrupted before it began")
        return True

    def _call_off_waiting(self, cell: WaitingCell, ranks: Sequence[int], now: float) -> None:
        """Drop some ranks of a cell that waits for repairs."""
        dropped = sorted(set(cell.message.ranks) & set(ranks))
        rest = [rank for rank in cell.message.ranks if rank not in dropped]
        who = self._roster.names.describe(self._cells.awaited(cell.message))
        if rest:
            cell.message = msgspec.structs.replace(cell.message, ranks=rest)
        else:
            self._waiting.remove(cell)
            self._transfers.drop(cell.serial)
        if cell.said and not rest and cell.since is not None:
            text = f"waited {now - cell.since:.0f} s for {who}, then was canceled"
            self._outbox.to_notebook(Remark(cell.serial, text, "watch"))
        text = f"the cell had not started: it was waiting for {who}"
        self._reply(
            cell.serial, dropped, "interrupted", Failure("KeyboardInterrupt", text, "", now, kind="interrupted")
        )

    def _refuse(self, cell: WaitingCell, status: Outcome, name: str, text: str) -> None:
        self._waiting.remove(cell)
        self._transfers.drop(cell.serial)
        kind: FailureKind = "interrupted" if status == "interrupted" else "raised"
        self._reply(cell.serial, cell.message.ranks, status, Failure(name, text, "", time.monotonic(), kind=kind))

    def _reply(self, serial: int, ranks: Sequence[int], status: Outcome, failure: Failure) -> None:
        for rank in ranks:
            self._outbox.to_notebook(Reply(serial, rank, status, failure))

    # --- on its way

    def _send_out(self, message: Execute, now: float) -> None:
        """Send a cell to those of its ranks that live, with the parcel as each node has it."""
        ranks = self._begun(message, now)
        parcels = self._transfers.parcels(message.serial)
        node_of = self._roster.where.node_of
        for node, parcel in parcels.items():
            there = [rank for rank in ranks if node_of(rank) == node]
            self._outbox.to_ranks(RANK_CELL, there, msgspec.structs.replace(message, parcel=parcel))
        self._outbox.to_ranks(RANK_CELL, [rank for rank in ranks if node_of(rank) not in parcels], message)

    def _begun(self, message: Execute, now: float) -> list[int]:
        """Note that ranks begin a cell. Returns those that do; of the others the notebook did not know yet."""
        living = []
        for number in message.ranks:
            rank = self._roster.ranks[number]
            if rank.dead:
                self._cells.died(msgspec.structs.replace(rank.dead, serial=message.serial), now)
                continue
            rank.begin(message.serial, message.number)
            living.append(number)
        return living
