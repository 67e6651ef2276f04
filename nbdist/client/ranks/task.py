"""One Execute in progress: gathers what ranks send, shows it, handles interrupts, and ends with results or one error.

Runs in the thread of the cell that started it (a background cell has its own). Independent of the wire except for the
messages; the traffic sends for it.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from nbdist.base import limits
from nbdist.base.ranks import describe_ranks
from nbdist.client.base import interruption
from nbdist.client.ranks import observers
from nbdist.client.ranks.prompts import Prompts
from nbdist.client.ranks.task_output import TaskOutput
from nbdist.client.ranks.task_record import Carrier, CellOptions, TaskRecord
from nbdist.client.reports import death_report, report
from nbdist.client.reports.stack_report import line_of
from nbdist.errors import RankError, RankFailure, RankTimeout, SessionBroken
from nbdist.wire.base.message import Handlers
from nbdist.wire.messages.cells import Interrupt, Kind, Recovered, Remark, Reply, Returned
from nbdist.wire.messages.healing import Renumbered
from nbdist.wire.messages.life import Broken, Died
from nbdist.wire.messages.output import Display, Notice, Output, Prompt, WidgetMessage
from nbdist.wire.questions.stopping import GetStack

_RUNGS = 4  # of a stop, each of which asks ranks and waits for the answers
_EXPLAIN_AFTER = 1.0  # seconds after an interrupt or another rank's failure until a rank that still runs is explained
_TAKE = 0.01  # seconds for which arriving messages are taken before they are shown
_ELSEWHERE_GRACE = 0.5  # seconds for ranks to stop when one on another node has failed


@dataclass(frozen=True)
class PastOutput:
    """What a rank printed before this client was there, already paid for; or a line of nbdist's own about it."""

    output: Output | None
    text: str = ""


@dataclass(frozen=True)
class _FailedElsewhere:
    """A rank on another node has failed, in the same launch."""

    failure: RankFailure


class Task(TaskRecord):
    """One Execute in progress.

    Args:
        traffic: Sends its messages.
        serial: Its number on the wire.
        ranks: The ranks it runs on.
        code: Its code, for messages.
        options: Its options.
        kind: The kind of Execute. The ranks of a "launch" live only for this task, so the first failure ends it.

    Attributes:
        error: What it failed with in the background.
    """

    def __init__(
        self,
        traffic: Carrier,
        serial: int,
        ranks: list[int],
        code: str,
        options: CellOptions,
        kind: Kind = "cell",
    ) -> None:
        super().__init__(serial, ranks, code, options, kind)
        self.error: BaseException | None = None
        self._traffic = traffic
        self._options = options
        self._launch = kind == "launch"
        self._events: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._unread: list[Any] = []
        self._prompts = Prompts(traffic.send)
        self._halted: set[int] = set()  # ranks that a debugger has stopped
        self._lock = threading.Lock()
        self._closed = False  # what comes from now on is late
        self._output = TaskOutput(traffic, self.result, self.number, options)
        self._interrupts = 0
        self._explain_at: float | None = None
        self._give_up_at: float | None = None

    # --- from the listening thread

    def put(self, message: object) -> bool:
        """Hand over a message for this task. False if it is over: pass the message to `show_late` instead."""
        with self._lock:
            if not self._closed:
                self._events.put(message)
            closed = self._closed
        if isinstance(message, (Reply, Died)):
            self._prompts.withdraw(message.rank)
        elif isinstance(message, Broken):
            self._prompts.withdraw()
        return not closed

    # --- in the task's own thread

    def wait(self, timeout: float | None = None) -> None:
        """Run until every rank has ended its part, or the user wants the notebook back.

        Args:
            timeout: Seconds after which the ranks are interrupted.

        Raises:
            RankError: A rank raised, died, or was still running in the end.
            KeyboardInterrupt: The user interrupted, and the ranks stopped.
            SessionBroken: The session has ended meanwhile.
        """
        deadline = None if timeout is None else self.started + timeout
        timed_out = False
        try:
            with interruption.events(self._events.put):
                looked = self.started
                while self.left and self.broken is None:
                    looked, before = time.monotonic(), looked
                    now = looked
                    if deadline is not None and self._halted:
                        deadline += now - before
                    if deadline is not None and now >= deadline and not timed_out:
                        timed_out = True
                        self._time_out(now)
                    if self._give_up_at is not None and now >= self._give_up_at:
                        break
                    if self._explain_at is not None and now >= self._explain_at:
                        self._explain()
                    self._take(self._patience(deadline if not timed_out else None))
                    if self._prompts.due(now) == 0.0:
                        deadline = self._ask_user(deadline)
                if self.left and self.broken is None:
                    self._note_running()
                if self.recovered is not None and self.recovered.text and not self.failures:
                    self.say(self.recovered.text)
                self._finish_output()
        finally:
            self.close()
            observers.cell_ended(self)
        self._conclude(timeout if timed_out else None)

    def halt(self, rank: int, *, stopped: bool) -> None:
        """Note that a debugger has stopped a rank, or let it go on; `timeout` rests meanwhile. From any thread."""
        if stopped:
            self._halted.add(rank)
        else:
            self._halted.discard(rank)

    def interrupt(self, ranks: Iterable[int] | None = None, *, now: bool = False) -> None:
        """Stop the ranks that still run it; a second call stops them at once.

        Args:
            ranks: Which of them; None for all.
            now: Don't wait for the end of a step, or for a rank to leave a collective by itself.
        """
        chosen = self.left if ranks is None else self.left & set(ranks)
        patience = limits.LAUNCH_PATIENCE if self._launch else None
        observers.cell_interrupted(self, chosen)
        self._traffic.send(Interrupt(self.serial, sorted(chosen), now, patience))

    def others_returned(self, ranks: Sequence[int]) -> None:
        """Note that ranks on other nodes have finished the same launch. From any thread."""
        self._traffic.send(Returned(self.serial, list(ranks)))

    def fail(self, failure: RankFailure) -> None:
        """End these ranks because one on another node has failed. From any thread."""
        if self.put(_FailedElsewhere(failure)):
            self.interrupt(now=True)

    @property
    def interrupted(self) -> bool:
        """Whether the user has asked it to stop."""
        return self._interrupts > 0

    def _patience(self, deadline: float | None) -> float:
        now = time.monotonic()
        dues = [at - now for at in (deadline, self._give_up_at, self._explain_at) if at is not None]
        if self._output.screen is not None and (due := self._output.screen.due(now)) is not None:
            dues.append(due)
        if (due := self._prompts.due(now)) is not None:
            dues.append(due)
        return max(0.0, min([*dues, interruption.HEED]))

    def _take(self, patience: float) -> None:
        """Handle what has arrived within `patience` seconds, and show what may be shown."""
        credits: dict[int, int] = {}
        with contextlib.suppress(queue.Empty):
            self._handle(self._events.get(timeout=patience), credits)
            enough = time.monotonic() + _TAKE
            while time.monotonic() < enough:  # a flood would never end
                self._handle(self._events.get_nowait(), credits)
        if self._output.screen is not None:
            self._output.screen.poll(time.monotonic())
        self._output.pay()
        for rank, size in credits.items():
            self._traffic.pay(rank, size)

    def _handle(self, event: object, credits: dict[int, int]) -> None:
        now = time.monotonic()
        if isinstance(event, Output):  # by far the most frequent
            credits[event.rank] = credits.get(event.rank, 0) + len(event.data)
            self._output.take(event, now)
        elif event is KeyboardInterrupt:
            self._interrupted(now)
        else:
            _HANDLERS(event, self, now)

    def _replied(self, event: Reply, now: float) -> None:
        self._end_rank(event.rank, report.from_reply(event), now)
        self.replies[event.rank] = event
        self.result[event.rank].result = event.result

    def _rank_died(self, event: Died, now: float) -> None:
        self._end_rank(event.rank, report.from_death(event, self._running()), now)
        self._give_up_at = now + limits.DEATH_GRACE + self._traffic.slack

    def _failed_elsewhere(self, event: _FailedElsewhere, now: float) -> None:
        self.failures.setdefault(event.failure.rank, event.failure)
        self._give_up_at = now + _ELSEWHERE_GRACE

    def _relay(self, event: WidgetMessage) -> None:
        self._traffic.pay_item(event)
        self._traffic.widgets.relay(event)

    def _remarked(self, event: Remark) -> None:
        self.waits = event.waits
        self._output.remark(event)

    def _repaired(self, event: Recovered) -> None:
        self.recovered = event

    def _ranks_gone(self, event: Broken) -> None:
        self.broken = event.text

    def _ask_user(self, deadline: float | None) -> float | None:
        """Ask for a line for a rank, below all that was shown before. Returns the deadline, which rests meanwhile."""
        began = time.monotonic()
        if self._output.screen is not None:
            self._output.screen.settle(began)
        if self._prompts.show_next():
            self._events.put(KeyboardInterrupt)
        return None if deadline is None else deadline + time.monotonic() - began

    def _end_rank(self, rank: int, failure: RankFailure | None, now: float) -> None:
        self.left.discard(rank)
        if self._output.screen is not None:
            self._output.screen.end_rank(rank, now)
        if failure is None:
            return
        self.failures[rank] = self.result[rank].error = failure
        if self._launch and failure.kind == "raised" and self._give_up_at is None:
            self._give_up_at = now + limits.LAUNCH_GRACE
        elif self._explain_at is None and failure.kind == "raised" and self.left:
            self._explain_at = now + self._options.grace + _EXPLAIN_AFTER

    # --- showing

    @property
    def silent(self) -> bool:
        """Whether nothing of it has been shown."""
        return self._output.screen is None or self._output.screen.silent

    def say(self, text: str) -> None:
        """Show a line of nbdist's own, among the output or below it."""
        if self._closed:
            self._traffic.put_late(self, Notice(text))
        else:
            self._output.say(text)

    def show_late(self, message: Any, now: float) -> float | None:
        """Show what came after the end. In the thread for late output."""
        if isinstance(message, Remark):
            self.waits = message.waits
        return self._output.show_late(message, now)

    def _show_past(self, event: PastOutput, now: float) -> None:
        if event.output is not None:
            self._output.take(event.output, now)
        else:
            self.say(event.text)

    def _finish_output(self) -> None:
        if self._output.screen is None:
            return
        self._output.screen.finish(time.monotonic())
        while (due := self._output.screen.due(time.monotonic())) is not None:  # the page takes only so much per second
            with contextlib.suppress(queue.Empty):
                event = self._events.get(timeout=due)
                if event is KeyboardInterrupt:
                    self._interrupts += 1
                    self._output.screen.abandon()
                else:
                    self._unread.append(event)
            self._output.screen.poll(time.monotonic())
            self._output.pay()

    def close(self) -> None:
        """Treat what comes from now on as late, including what came while the rest was shown."""
        with self._lock:
            self._closed = True
        with contextlib.suppress(queue.Empty):
            while True:
                self._unread.append(self._events.get_nowait())
        for event in self._unread:
            if event is KeyboardInterrupt:
                self._interrupts += 1
            else:
                self._traffic.put_late(self, event)

    # --- failures

    def _interrupted(self, now: float) -> None:
        self._interrupts += 1
        if self._output.screen is not None:
            self._output.screen.hurry()
        if self._interrupts == 1:
            self.interrupt()
            self._explain_at = now + _EXPLAIN_AFTER
        elif self._interrupts == 2:
            self.interrupt(now=True)
            grace = limits.LAUNCH_PATIENCE if self._launch else limits.FORCE_GRACE
            self._give_up_at = now + grace + _RUNGS * self._traffic.slack
        else:
            self._give_up_at = now

    def _time_out(self, now: float) -> None:
        self.interrupt()
        self._give_up_at = now + limits.TIMEOUT_GRACE + _RUNGS * self._traffic.slack

    def _explain(self) -> None:
        """Report which ranks still run, where, and what the user can do."""
        self._explain_at = None
        found = self._lines()
        if not self.left:
            return
        lines = [f"rank {rank} is in {found[rank]}" for rank in sorted(self.left) if found.get(rank)]
        where = ("; " + "; ".join(lines[:4])) if lines else ""
        names = self._traffic.places
        who = names.describe(self.left)
        if self._interrupts:
            for line in self._why_not_yet(self.left - found.keys(), where):
                self.say(line)
            return
        failed = sorted(self.failures)
        first = self.failures[failed[0]]
        self.say(
            f"{names.describe(failed)} raised {first.name}: {first.text.splitlines()[0] if first.text else ''}\n"
            f"nbdist: {who} still running{where}. Interrupt the kernel to stop them."
        )

    def _why_not_yet(self, silent: set[int], where: str) -> Iterator[str]:
        """Yield what interrupted ranks are waited for, those that do not answer last: they may be out of reach."""
        names = self._traffic.places
        if answering := self.left - silent:
            yield (
                f"{names.describe(answering)} will stop when this call ends{where}; if it is a collective, nbdist ends "
                "it in a moment, and what an `except` or `finally` does may take its time. Interrupt again to stop "
                "them now."
            )
        if not silent:
            return
        have, they = ("has", "it") if len(silent) == 1 else ("have", "they")
        away = ", or the network or the machine may have failed" if names.nodes else ""
        yield (
            f"{names.describe(silent)} {have} not answered so far: {they} may be in a call that blocks Python{away}. "
            "Interrupt again to stop them now: the cell then ends without those that do not answer."
        )

    def _lines(self, limit: float = limits.STACK_ANSWER) -> dict[int, str]:
        """Return where ranks are that still run, and answer; without those that have ended while they were asked."""
        answers = self._traffic.ask(sorted(self.left), GetStack(), timeout=limit)
        self._take(0.0)
        return {rank: line_of(answer) for rank, answer in answers.items()}

    def _running(self) -> str:
        if self._launch:
            return f", while it ran {self.code}"
        line = next((line for line in self.code.splitlines() if line.strip()), "")
        return f", while it ran cell {self.number}: {line.strip()[:60]}" if line else ""

    def _conclude(self, timed_out: float | None) -> None:
        """Return the results, or raise the error."""
        if self.broken is not None:
            raise SessionBroken(self.broken)
        if not self.failures:
            self._heed_late_interrupt()
            return
        finished = [rank for rank in self.ranks if rank not in self.failures]
        text = self.recovered.text if self.recovered is not None else ""
        file = death_report.new_path() if self.bereaved and not self._launch else None
        error = report.build(
            self.failures.values(), finished, recovered=text, launch=self._launch, names=self._traffic.places, file=file
        )
        error.interrupted = self.interrupted
        if file is not None:
            death_report.write_later(file, self._traffic, self._scene(), error, self.say)
        if timed_out is not None:
            given = "timeout" if self._launch else "--timeout"
            raise RankTimeout(
                f"not done after {timed_out:g} s ({given}); the ranks were interrupted\n{error.report}",
                error.failures,
            )
        if all(failure.kind == "interrupted" for failure in self.failures.values()):
            raise _interruption(error, self.recovered.step if self.recovered is not None else 0, self._end)
        raise error

    def _scene(self) -> death_report.Scene:
        title = f"cell {self.number}, on {self._traffic.places.describe(self.ranks)}"
        return death_report.Scene(title, self.code, self.result, dict(self.failures), dict(self.waits))

    def _heed_late_interrupt(self) -> None:
        """Raise an interrupt that came after the ranks had finished: it is meant for what would run next."""
        if self._interrupts and not any(reply.caught for reply in self.replies.values()):
            then = self._end or _kept(self.ranks)
            have = "has" if len(self.ranks) == 1 else "have"
            raise interruption.interruption(f"{describe_ranks(self.ranks)} {have} finished this cell; {then}")

    @property
    def _end(self) -> str:
        """Why the ranks are gone after an interrupt; empty: they are not."""
        if self._launch:
            return "they have ended"
        return "their session was stopped" if self._traffic.is_stopping else ""

    def _note_running(self) -> None:
        """Count the ranks that still run among the failures."""
        kind = "ended" if self._launch and self.failures else "running"
        if self._launch and self._interrupts:  # they end with the launch
            kind = "interrupted"
        lines = self._lines(limits.DEATH_ANSWER if self.bereaved else limits.STACK_ANSWER)
        for rank in self.left:
            text = f"in {lines[rank]}" if lines.get(rank) else "in a call that blocks Python"
            where = f"  {text}" if kind == "interrupted" else ""
            failure = RankFailure(rank, kind, "RankTimeout", text, where, time.monotonic())
            self.failures[rank] = self.result[rank].error = failure


# Its functions are given the task: bound to it, they would keep it and its results until the garbage collector comes.
_HANDLERS = (
    Handlers[[Task, float]]()
    .on(Display, lambda event, task, now: task._output.take(event, now))
    .on(PastOutput, lambda event, task, now: task._show_past(event, now))
    .on(Reply, lambda event, task, now: task._replied(event, now))
    .on(Died, lambda event, task, now: task._rank_died(event, now))
    .on(_FailedElsewhere, lambda event, task, now: task._failed_elsewhere(event, now))
    .on(Prompt, lambda event, task, now: task._prompts.add(event))
    .on(WidgetMessage, lambda event, task, now: task._relay(event))
    .on(Notice, lambda event, task, now: task.say(event.text))
    .on(Remark, lambda event, task, now: task._remarked(event))
    .on(Recovered, lambda event, task, now: task._repaired(event))
    .on(Renumbered, lambda event, task, now: task._output.renumber(event.numbers))
    .on(Broken, lambda event, task, now: task._ranks_gone(event))
)


def _kept(ranks: Collection[int]) -> str:
    return f"{'its' if len(ranks) == 1 else 'their'} variables are kept"


def _interruption(error: RankError, step: int, end: str) -> KeyboardInterrupt:
    """Return the KeyboardInterrupt as the notebook shows it: one line, and where the ranks were.

    Args:
        step: The step after which all ranks stopped together, 0 for none.
        end: Why the ranks are gone; empty: they are not.
    """
    who = describe_ranks(sorted(error.failures))
    what, then = f"{who} interrupted", _kept(error.failures)
    if step:
        what, then = f"all ranks stopped after step {step:,}", "run the cell again to continue"
    return interruption.interruption(f"{what}; {end or then}", *error.report.splitlines()[1:])
