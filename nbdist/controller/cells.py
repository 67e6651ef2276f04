"""The cells that run: who is at it, how one is stopped, and what is put in order when one has failed.

Drives a ladder, a watch and a recovery per cell. Knows messages, not sockets.
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from nbdist.controller.ladder import Ladder
from nbdist.controller.recovery import Recovery
from nbdist.controller.watch import Watch
from nbdist.protocol import (
    RANK_CELL,
    RANK_CONTROL,
    Answer,
    Ask,
    Died,
    Execute,
    InOrder,
    Interrupt,
    Message,
    Recover,
    Recovered,
    Remark,
    Reply,
)

_DEATH_GRACE = 0.15  # seconds until the survivors of a death count as stuck


class Wires(Protocol):
    """What the controller does for us."""

    def to_rank(self, lane: str, rank: int, message: Message) -> None:
        """Send to a rank, if it lives."""

    def to_notebook(self, message: Message) -> None:
        """Tell the notebook."""

    def idle(self) -> list[int]:
        """Living ranks that run nothing."""

    def dead(self) -> list[int]:
        """Ranks that have died."""


Handler = Callable[[int, dict[str, Any], float], None]


@dataclass
class _Question:
    """A question to control threads, and who has not answered it yet."""

    left: set[int]
    handler: Handler


@dataclass
class _Cell:
    serial: int
    ranks: list[int]
    left: set[int]
    watch: Watch
    failed: bool = False
    ladder: Ladder | None = None
    last: Message | None = None  # the message that ends it, held until all is in order

    @property
    def stopping(self) -> bool:
        """Whether ranks are on their way out: then nobody needs to be told where they wait."""
        return self.ladder is not None and bool(self.ladder.left)


class Cells:
    """All cells of a set of ranks.

    Args:
        wires: To the ranks and the notebook.
        execute: Called with an Execute that had to wait, when the ranks are in order.
    """

    def __init__(self, wires: Wires, execute: Callable[[Execute], None]) -> None:
        self._wires = wires
        self._execute = execute
        self._generation = 1
        self._running: dict[int, _Cell] = {}
        self._over: deque[_Cell] = deque()  # wait for their recovery
        self._recovery: tuple[_Cell, Recovery] | None = None
        self._lost: list[str] = []  # groups that a death has taken
        self._waiting: deque[Execute] = deque()
        self._requests = itertools.count(-1, -1)
        self._asked: dict[int, _Question] = {}

    # --- what happens

    def begin(self, message: Execute, now: float) -> bool:
        """A cell is to run. False: not yet; `execute` is called with it when the ranks are in order."""
        if self._recovery is not None:
            self._waiting.append(message)
            return False
        serial, ranks = message.serial, message.ranks
        watch = Watch(
            serial,
            ranks,
            message.grace,
            lambda who, question, arguments: self._ask(who, question, arguments, self._to_watch(serial)),
            lambda text, same, stuck: self._wires.to_notebook(Remark(serial, text, "watch", same, stuck, watch.waits)),
            lambda who: self._free(serial, who),
            now,
            launch=message.kind == "launch",
        )
        self._running[serial] = _Cell(serial, ranks, set(ranks), watch)
        return True

    def stop(self, message: Interrupt, now: float) -> None:
        """The user wants a cell to stop; once more: at once."""
        cell = self._running.get(message.serial)
        if cell is None:
            return
        ranks = sorted(cell.left & set(message.ranks))
        if cell.ladder is not None and (message.now or cell.ladder.left):
            cell.ladder.force(now)
        elif ranks:
            self._descend(cell, ranks, now, together=set(ranks) == cell.left, grace=message.patience)
            if message.now and cell.ladder is not None:
                cell.ladder.force(now)

    def ended(self, reply: Reply, now: float) -> None:
        """A rank has finished its part."""
        cell = self._running.get(reply.serial)
        if cell is None:
            self._wires.to_notebook(reply)
            return
        self._leave(cell, reply.rank, reply, reply.status != "ok", now)

    def died(self, died: Died, now: float) -> None:
        """A rank has died."""
        for each in self._running.values():
            each.watch.forget(died.rank)
        if self._recovery is not None:
            self._recovery[1].died(died.rank, now)
        for request in [request for request, question in self._asked.items() if died.rank in question.left]:
            self._answer(request, died.rank, {"error": "dead"}, now)
        cell = self._running.get(died.serial)
        if cell is None:
            self._wires.to_notebook(died)
        else:
            self._leave(cell, died.rank, died, True, now)
            if cell.left and cell.ladder is None:
                self._descend(cell, sorted(cell.left), now, together=False, grace=_DEATH_GRACE)
        self._check_recovery(now)

    def answered(self, answer: Answer, now: float) -> None:
        """A control thread has answered a question of ours."""
        self._answer(answer.request, answer.rank, answer.data, now)
        self._check_recovery(now)

    def in_order(self, rank: int, report: InOrder, now: float) -> None:
        """A rank has done what Recover asked."""
        if self._recovery is not None:
            self._recovery[1].in_order(rank, report)
        self._check_recovery(now)

    def due(self) -> float | None:
        """When `tick` wants to be called."""
        dues = [cell.watch.due for cell in self._running.values() if not cell.stopping]
        dues += [
            cell.ladder.due
            for cell in self._running.values()
            if cell.ladder is not None and cell.ladder.due is not None
        ]
        if self._recovery is not None:
            dues.append(self._recovery[1].due)
        return min(dues, default=None)

    def tick(self, now: float) -> None:
        """Time has passed."""
        for cell in list(self._running.values()):
            if not cell.stopping:
                cell.watch.tick(now)
            if cell.ladder is not None:
                cell.ladder.tick(now)
        if self._recovery is not None:
            self._recovery[1].tick(now)
        self._check_recovery(now)

    # --- stopping

    def _descend(
        self, cell: _Cell, ranks: Sequence[int], now: float, *, together: bool, grace: float | None = None
    ) -> None:
        serial = cell.serial

        def ask(who: Sequence[int], question: str, arguments: dict[str, Any]) -> None:
            self._ask(who, question, arguments, self._to_ladder(serial, question))

        def raise_on(who: Sequence[int]) -> None:
            for rank in who:
                self._wires.to_rank(RANK_CONTROL, rank, Interrupt(serial, [rank]))

        keywords = {} if grace is None else {"grace": grace}
        cell.ladder = Ladder(serial, ranks, ask, raise_on, now, together=together, **keywords)

    def _to_ladder(self, serial: int, question: str) -> Handler:
        def handle(rank: int, data: dict[str, Any], now: float) -> None:
            cell = self._running.get(serial)
            if cell is not None and cell.ladder is not None:
                cell.ladder.answered(rank, question, data, now)

        return handle

    def _to_watch(self, serial: int) -> Handler:
        def handle(rank: int, data: dict[str, Any], now: float) -> None:
            cell = self._running.get(serial)
            if cell is not None:
                cell.watch.answered(rank, data, now)

        return handle

    def _free(self, serial: int, ranks: Sequence[int]) -> None:
        """Free ranks that wait for one that has failed."""
        for rank in ranks:
            self._wires.to_rank(RANK_CONTROL, rank, Interrupt(serial, [rank]))
        self._ask(ranks, "cut", {"serial": serial, "force": True})

    # --- the end of a cell

    def _leave(self, cell: _Cell, rank: int, message: Message, failed: bool, now: float) -> None:
        cell.left.discard(rank)
        cell.failed = cell.failed or failed
        cell.watch.ended(rank, failed, now)
        if cell.ladder is not None:
            cell.ladder.ended(rank)
        if cell.left or not cell.failed:
            self._wires.to_notebook(message)
        if cell.left:
            return
        del self._running[cell.serial]
        if cell.failed:
            cell.last = message
            self._over.append(cell)
            self._recover_next(now)

    def _recover_next(self, now: float) -> None:
        if self._recovery is not None or not self._over:
            return
        cell = self._over.popleft()
        recovery = Recovery(
            cell.serial, cell.ranks, self._wires.idle(), self._wires.dead(), self._generation, self._lost, now
        )
        self._recovery = cell, recovery
        recovery.begin(
            lambda ranks, question, arguments: self._ask(ranks, question, arguments, self._to_recovery),
            self._send_recover,
        )
        self._check_recovery(now)

    def _to_recovery(self, rank: int, data: dict[str, Any], now: float) -> None:
        if self._recovery is not None:
            self._recovery[1].answered(rank, data, now)

    def _send_recover(self, ranks: Sequence[int], message: Recover) -> None:
        for rank in ranks:
            self._wires.to_rank(RANK_CELL, rank, message)

    def _check_recovery(self, now: float) -> None:
        if self._recovery is None or not self._recovery[1].done:
            return
        cell, recovery = self._recovery
        self._recovery = None
        self._generation, self._lost = recovery.generation, recovery.lost
        seconds = time.monotonic() - recovery.began
        self._wires.to_notebook(Recovered(cell.serial, recovery.generation, recovery.text, recovery.step, seconds))
        if cell.last is not None:
            self._wires.to_notebook(cell.last)
        self._recover_next(now)
        while self._waiting and self._recovery is None:
            self._execute(self._waiting.popleft())

    # --- questions to control threads

    def _ask(
        self, ranks: Sequence[int], question: str, arguments: dict[str, Any], handler: Handler | None = None
    ) -> None:
        request = next(self._requests)
        living = [rank for rank in ranks if rank not in self._wires.dead()]
        if handler is not None and living:
            self._asked[request] = _Question(set(living), handler)
        for rank in living:
            self._wires.to_rank(RANK_CONTROL, rank, Ask(request, [rank], question, arguments))

    def _answer(self, request: int, rank: int, data: dict[str, Any], now: float) -> None:
        question = self._asked.get(request)
        if question is None or rank not in question.left:
            return
        question.left.discard(rank)
        if not question.left:
            del self._asked[request]
        question.handler(rank, data, now)
