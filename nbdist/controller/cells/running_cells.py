"""The running cells: which ranks run them, how they are stopped, and what is repaired after one fails.

Drives a ladder and a watch per cell, and the repairs between cells. While a rank waits for a line from the user, nobody
times out waiting for it. Handles messages, not sockets.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from nbdist.base import limits
from nbdist.controller.base.inquiries import A, AskRanks, Handler, Inquiries
from nbdist.controller.base.outbox import Outbox
from nbdist.controller.cells.ladder import Ladder
from nbdist.controller.cells.recovery import FailedCell, Recovery
from nbdist.controller.cells.repairs import Repairs
from nbdist.controller.cells.waiting_cells import WaitingCell, WaitingCells
from nbdist.controller.cells.watch import Pauses, Watch
from nbdist.controller.nodes.roster import Roster
from nbdist.wire.base.message import Message
from nbdist.wire.lanes import RANK_CONTROL
from nbdist.wire.messages.cells import Execute, InOrder, Interrupt, Remark, Reply, Returned
from nbdist.wire.messages.life import Died
from nbdist.wire.messages.output import Prompt
from nbdist.wire.messages.visitor_messages import RunningCell
from nbdist.wire.questions.question import NoAnswer, Question
from nbdist.wire.questions.questions import OF_AGENTS, Answer, Ask
from nbdist.wire.questions.stopping import Cut, Enter, Rest, Strand

_NOBODY = "the notebook that ran this cell is gone, so input is not available"


class OpenPrompts:
    """The prompts that have not been answered. `ask`: asks control threads."""

    def __init__(self, ask: AskRanks) -> None:
        self._ask = ask
        self._open: dict[int, Prompt] = {}
        self._rested: set[int] = set()  # cells whose ranks no longer hurry

    def add(self, prompt: Prompt, serial: int, ranks: Sequence[int]) -> None:
        """Note that a rank waits for the user.

        Args:
            prompt: What it asks.
            serial: The cell it runs.
            ranks: All ranks of that cell.
        """
        self._open[prompt.rank] = prompt
        if serial not in self._rested:
            self._rested.add(serial)
            self._ask(ranks, Rest(serial))

    def answered(self, rank: int) -> None:
        """Note that the user has answered a rank, or that it no longer asks."""
        self._open.pop(rank, None)

    def forget(self, serial: int) -> None:
        """Note that a cell is over on all ranks."""
        self._rested.discard(serial)

    def refuse_all(self) -> None:
        """Have every rank that asks fail instead: nobody is left to answer."""
        prompts, self._open = self._open, {}
        for rank, prompt in prompts.items():
            self._ask([rank], Enter(prompt.sequence, _NOBODY, "refused"))


_PAUSE = 1.0  # seconds, after an error


@dataclass
class _Cell:
    serial: int
    number: int
    began: float
    ranks: list[int]
    left: set[int]
    watch: Watch
    failed: set[int] = field(default_factory=set)
    cut: set[int] = field(default_factory=set)  # ranks to be freed by force
    broken: set[int] = field(default_factory=set)  # ranks with a process group that a failed collective has broken
    repaired: set[int] = field(default_factory=set)  # ranks that failed and were repaired while others kept running
    ladder: Ladder | None = None

    @property
    def unsure(self) -> set[int]:
        """Ranks that left the cell perhaps out of step: a cell may catch the error that freed it and finish well."""
        return (self.failed | self.cut | self.broken) - self.left

    @property
    def failure(self) -> FailedCell:
        """What there is to repair."""
        return FailedCell(self.serial, self.ranks, self.unsure, caught=not self.failed and not self.cut)

    @property
    def stopping(self) -> bool:
        """Whether ranks are already being stopped: then nobody needs to be told where they wait."""
        return self.ladder is not None and bool(self.ladder.left)


class Cells:
    """All cells of a set of ranks.

    Args:
        roster: The ranks.
        outbox: Sends to them.
        waiting: Cells that have not begun.
        retry: Called when cells that waited for repairs may begin.

    Attributes:
        prompts: Which ranks wait for the user.
    """

    def __init__(self, roster: Roster, outbox: Outbox, waiting: WaitingCells, retry: Callable[[], None]) -> None:
        self._roster = roster
        self._outbox = outbox
        self._waiting = waiting
        self._running: dict[int, _Cell] = {}
        self._rests_until = 0.0
        self._inquiries = Inquiries(self._send, roster.dead)
        self._repairs = Repairs(roster, outbox, self._inquiries.ask, waiting, retry)
        self.prompts = OpenPrompts(self._inquiries.ask)

    def _send(self, ranks: Sequence[int], question: Ask) -> None:
        """Send a question to control threads, or to the agents that answer for their ranks."""
        if not isinstance(question.question, OF_AGENTS):
            self._outbox.to_ranks(RANK_CONTROL, ranks, question)
            return
        for rank in ranks:
            self._outbox.to_agent_of(rank, msgspec.structs.replace(question, ranks=[rank]))

    # --- events

    @property
    def quiet(self) -> bool:
        """Whether nothing runs or is about to, and nothing is being repaired."""
        return not self._running and not self._waiting.under_way and self._repairs.quiet

    @property
    def generation(self) -> int:
        """Of the process groups."""
        return self._repairs.generation

    @property
    def ask(self) -> AskRanks:
        """Asks control threads; it goes on without ranks that die."""
        return self._inquiries.ask

    def renumber(self, numbers: Mapping[int, int]) -> None:
        """Note that ranks have other numbers, while it is `quiet`; those without one are gone."""
        self._inquiries.renumber(numbers)
        self._repairs.renumber(numbers)

    def forget_dead(self) -> None:
        """Note that nobody will take the places of those that have died."""
        self._repairs.forget_dead()

    def admit(self, newcomers: Sequence[int], over: Callable[[Recovery], None], now: float) -> None:
        """Bring newcomers into the groups, like `Repairs.admit`."""
        self._repairs.admit(newcomers, over, now)

    def awaited(self, message: Execute) -> set[int]:
        """Return the ranks that keep a cell from beginning."""
        return self._repairs.awaited(message)

    def begin(self, cell: WaitingCell, now: float) -> bool:
        """Begin a cell. False if it has to wait: `retry` is called once ranks are repaired."""
        message = cell.message
        self._repair_failed_parts(set(message.ranks))
        if self._repairs.must_wait(cell, now):
            return False
        serial, ranks = message.serial, message.ranks
        watch = Watch(
            serial,
            ranks,
            message.grace,
            self._asking_about(serial),
            lambda text, same, stuck: self._outbox.to_notebook(Remark(serial, text, "watch", same, stuck, watch.waits)),
            lambda who: self._free(serial, who),
            now,
            launch=message.kind == "launch",
            part=bool(self._running) or len(self._roster.idle()) > len(ranks),
            names=self._roster.names,
            pauses=Pauses().slower(self._roster.slack),
            strand=lambda rank, why: self._asking_about(serial)([rank], Strand(serial, why)),
        )
        self._running[serial] = _Cell(serial, message.number, now, ranks, set(ranks), watch)
        return True

    def _repair_failed_parts(self, ranks: set[int]) -> None:
        """Repair ranks that this cell will use and that failed in another cell that has not ended yet."""
        for cell in self._running.values():
            if ranks & cell.unsure - cell.repaired:
                cell.repaired |= cell.unsure
                self._repairs.add(cell.failure)

    def stop(self, message: Interrupt, now: float) -> None:
        """Stop a cell at the user's request; a second request stops it at once."""
        cell = self._running.get(message.serial)
        if cell is None:
            self._repairs.let_end(message.serial)
            return
        ranks = sorted(cell.left & set(message.ranks))
        if cell.ladder is not None and (message.now or cell.ladder.left):
            cell.ladder.force(now)
        elif ranks:
            self._descend(cell, ranks, now, together=set(ranks) == cell.left, grace=message.patience)
            if message.now and cell.ladder is not None:
                cell.ladder.force(now)

    def returned_elsewhere(self, message: Returned, now: float) -> None:
        """Note that ranks on other nodes have finished their part."""
        cell = self._running.get(message.serial)
        if cell is not None:
            cell.watch.returned(message.ranks, now)

    def asked(self, prompt: Prompt, serial: int) -> None:
        """Note that a rank waits for the user in a cell."""
        cell = self._running.get(serial)
        self.prompts.add(prompt, serial, cell.ranks if cell is not None else [prompt.rank])

    def ended(self, reply: Reply, now: float) -> None:
        """Note that a rank has finished its part."""
        self._repairs.note_group(reply.rank, reply.grouped)
        cell = self._running.get(reply.serial)
        if cell is None:
            self._outbox.to_notebook(reply)
            return
        if reply.broken:
            cell.broken.add(reply.rank)
        self._leave(cell, reply.rank, reply, reply.status != "ok", now)

    def died(self, died: Died, now: float) -> None:
        """Handle the death of a rank."""
        for each in self._running.values():
            each.watch.forget(died.rank)
        self._repairs.died(died.rank, now)
        self._inquiries.died(died.rank, now)
        cell = self._running.get(died.serial)
        if cell is None:
            self._outbox.to_notebook(died)
        else:
            self._leave(cell, died.rank, died, True, now)
            if cell.left and cell.ladder is None:
                self._descend(cell, sorted(cell.left), now, together=False, grace=limits.SURVIVORS)
        self._repairs.go_on(now)

    def answered(self, answer: Answer, now: float) -> None:
        """Handle a control thread's answer to one of our questions."""
        self._inquiries.answered(answer, now)
        self._repairs.go_on(now)

    def in_order(self, rank: int, report: InOrder, now: float) -> None:
        """Note that a rank has carried out a Recover."""
        self._repairs.in_order(rank, report)
        self._repairs.go_on(now)

    def go_on(self, now: float) -> None:
        """Go on with repairs, and with the cells that wait for them, as far as that is possible."""
        self._repairs.go_on(now)

    def left(self) -> dict[int, list[int]]:
        """Return the ranks that still run something, by its serial."""
        return {cell.serial: sorted(cell.left) for cell in self._running.values()}

    def running(self, now: float) -> list[RunningCell]:
        """Return what runs."""
        return [RunningCell(cell.number, len(cell.left), now - cell.began) for cell in self._running.values()]

    def due(self) -> float | None:
        """Return the time of the next `tick`."""
        dues: list[float | None] = [cell.watch.due for cell in self._running.values() if not cell.stopping]
        dues += [cell.ladder.due for cell in self._running.values() if cell.ladder is not None]
        dues.append(self._repairs.due())
        due = min((due for due in dues if due is not None), default=None)
        return None if due is None else max(due, self._rests_until)

    def tick(self, now: float) -> None:
        """Do what is due at this time."""
        due = self.due()
        if due is None or now < due:
            return
        try:
            self._do_what_is_due(now)
        except Exception:  # what a rank has answered makes no sense; the others' cells go on
            traceback.print_exc()
            self._rests_until = now + _PAUSE

    def _do_what_is_due(self, now: float) -> None:
        for cell in list(self._running.values()):
            if not cell.stopping:
                cell.watch.tick(now)
            if cell.ladder is not None:
                cell.ladder.tick(now)
        self._repairs.tick(now)

    # --- stopping

    def _descend(
        self, cell: _Cell, ranks: Sequence[int], now: float, *, together: bool, grace: float | None = None
    ) -> None:
        serial = cell.serial

        ask = self._asking_about(serial)

        def raise_on(who: Sequence[int]) -> None:
            now = cell.ladder is not None and cell.ladder.forced
            for rank in who:
                self._outbox.to_rank(RANK_CONTROL, rank, Interrupt(serial, [rank], now))

        def say(text: str) -> None:
            self._outbox.to_notebook(Remark(serial, text, "stop"))

        keywords = {} if grace is None else {"grace": grace}
        slack = self._roster.slack
        cell.ladder = Ladder(serial, ranks, ask, raise_on, say, now, together=together, slack=slack, **keywords)

    def _asking_about(self, serial: int) -> AskRanks:
        """Return a function that asks ranks about a cell; after the cell ends, answers are dropped."""

        def ask(ranks: Sequence[int], question: Question[A], handler: Handler[A] | None = None) -> None:
            if isinstance(question, Cut | Strand) and serial in self._running:
                self._running[serial].cut.update(ranks)

            def handle(rank: int, answer: A | NoAnswer, now: float) -> None:
                if serial in self._running and handler is not None:
                    handler(rank, answer, now)

            self._inquiries.ask(ranks, question, None if handler is None else handle)

        return ask

    def _free(self, serial: int, ranks: Sequence[int]) -> None:
        """Free ranks that wait for one that failed."""
        for rank in ranks:
            self._outbox.to_rank(RANK_CONTROL, rank, Interrupt(serial, [rank]))
        self._asking_about(serial)(ranks, Cut(serial, force=True))

    # --- the end of a cell

    def _leave(self, cell: _Cell, rank: int, message: Message, failed: bool, now: float) -> None:
        cell.left.discard(rank)
        self.prompts.answered(rank)
        if failed:
            cell.failed.add(rank)
        cell.watch.ended(rank, failed, now)
        if cell.ladder is not None:
            cell.ladder.ended(rank)
        if cell.left:
            self._outbox.to_notebook(message)
            return
        in_order = not cell.unsure or self._roster.are_apart(cell.ranks)
        if in_order:
            self._outbox.to_notebook(message)
        del self._running[cell.serial]
        self.prompts.forget(cell.serial)
        if not in_order:
            self._repairs.add(cell.failure, message)
            self._repairs.go_on(now)
