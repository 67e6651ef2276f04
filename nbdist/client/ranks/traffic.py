"""Messages between this kernel and the ranks of one session: which rank runs what, and where each message belongs.

Owns the listening thread's side of a session and the thread for late output. Independent of how ranks start and end.
"""

from __future__ import annotations

import contextlib
import itertools
import queue
import secrets
import threading
import time
import traceback
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from typing import Any, TypeVar

from nbdist.base.ranks import RankNames
from nbdist.client.base.answers import AnswerStreams, gather
from nbdist.client.base.widget_proxies import WidgetProxies
from nbdist.client.ranks import observers, prompts
from nbdist.client.ranks.task import Task
from nbdist.client.ranks.task_record import TaskRecord
from nbdist.client.reports.report import describe_death
from nbdist.client.start.connection import Connection
from nbdist.errors import SessionBroken, SessionClosed, SessionError
from nbdist.wire.base.message import Handlers, Message
from nbdist.wire.messages.cells import Recovered, Remark, Reply
from nbdist.wire.messages.handover import Attached, AttachRefused, Displaced
from nbdist.wire.messages.healing import Renumbered, SetupCell
from nbdist.wire.messages.life import Broken, Died, RankInfo, Started
from nbdist.wire.messages.output import (
    OUTPUT_CREDIT,
    Credit,
    Display,
    LogPart,
    Notice,
    Output,
    Prompt,
    ReadLog,
    WidgetMessage,
)
from nbdist.wire.questions.knowing import Release
from nbdist.wire.questions.question import A, NoAnswer, Question
from nbdist.wire.questions.questions import Answer, Ask, CellsRun, GetCellsRun, GetStatus, Look, Status, ask

_ANSWER_LIMIT = 5.0
_NO_CONTROLLER = (
    "the session's controller does not answer: try `%distributed restart`, or `%distributed stop` and then "
    "`%distributed start`"
)
_LATE_LIMIT = 1.0  # seconds for the page to take the last late output

_Told = TypeVar("_Told", LogPart, Status, CellsRun)
_Late = tuple[TaskRecord | None, Message]  # a message, and the task after whose end it has come


class Traffic:
    """The messages of one session.

    Args:
        on_life: Called from the listening thread with each message about the session's life.

    Attributes:
        key: A unique name.
        names: The variables on each rank, as far as is known.
        places: How to name ranks, by their nodes if there are several.
        streams: Answers of ranks that keep coming.
        slack: Seconds that answers of ranks may take beyond their limits.
        is_stopping: Whether its ranks are ended on request.
        dead: How ranks died.
        generation: Of the process groups: one more than the number of times they have been renewed.
    """

    def __init__(self, on_life: Callable[[Message], None]) -> None:
        self.key = secrets.token_hex(4)
        self.names: dict[int, list[str]] = {}
        self.places = RankNames()
        self.slack = 0.0
        self.is_stopping = False
        self.dead: dict[int, Died] = {}
        self._replacing: Container[int] = ()  # ranks whose end is no news
        self.generation = 0
        self.widgets = WidgetProxies(self.send)
        self._on_life = on_life
        self._connection: Connection | None = None
        self._requests = itertools.count(1)
        self._answers: dict[int, queue.SimpleQueue[Answer | Broken]] = {}
        self._told: dict[
            int, queue.SimpleQueue[LogPart | Status | CellsRun | Broken]
        ] = {}  # answers of the controller itself
        self._gone: Broken | None = None  # there is nobody to ask
        self.streams = AnswerStreams(self.send, lambda: next(self._requests))
        self._running: dict[int, Task] = {}
        self._latest: dict[int, Task] = {}
        self._untold: list[Notice] = []
        self._owed: dict[int, int] = {}
        self._late: queue.SimpleQueue[_Late | None] | None = None  # None: nothing more comes
        self._late_thread: threading.Thread | None = None
        self._waiting: list[Message] | None = None  # what came before it is known which rank runs what
        self._lock = threading.Lock()
        self._freed = threading.Condition(self._lock)
        self._handlers = self._table()

    def attach(self, connection: Connection) -> None:
        """Send through this connection from now on."""
        self._connection = connection
        connection.on_message = self._on_message

    def begin(self, started: Started | Attached) -> None:
        """Start with a fresh set of ranks, to which nothing of the last one applies."""
        self.slack, self.is_stopping, self._gone = started.slack, False, None
        self.place(started.ranks)
        self.names, self.dead, self._owed = {}, {}, {}
        self.generation = 1
        self._untold.clear()
        self.widgets = WidgetProxies(self.send)

    def place(self, ranks: Iterable[RankInfo]) -> None:
        """Note where all ranks are."""
        nodes: dict[str, list[int]] = {}
        for info in ranks:
            if info.host:
                nodes.setdefault(info.host, []).append(info.rank)
        self.places = RankNames(nodes)

    def hold(self) -> None:
        """Keep what comes until `take_up`, but for messages about the session's life."""
        self._waiting = []

    def take_up(self, attached: Attached, tasks: Sequence[Task]) -> None:
        """Go on where another client was: with tasks that run, or have ended.

        Args:
            attached: What the controller has told.
            tasks: In the order of its cells.
        """
        self._requests = itertools.count(attached.first_serial)  # answers to the other's questions are none of ours
        self.names = dict(attached.names)
        for task, cell in zip(tasks, attached.cells, strict=True):
            self.assign(task)
            for end in cell.ends:
                self._on_cell(end)
        self.dead, self.generation = {died.rank: died for died in attached.dead}, attached.generation
        while True:
            with self._lock:
                waiting, self._waiting = self._waiting, [] if self._waiting else None
            if not waiting:
                return
            for message in waiting:
                self._on_cell(message)

    @contextlib.contextmanager
    def replacing(self, ranks: Container[int]) -> Iterator[None]:
        """Take the end of these ranks in the body for expected."""
        self._replacing = ranks
        try:
            yield
        finally:
            self._replacing = ()

    def revive(self, ranks: Iterable[int]) -> None:
        """Note that new processes have taken the places of dead ranks."""
        with self._lock:
            for rank in ranks:
                for known in (self.dead, self.names, self._owed):
                    known.pop(rank, None)

    # --- to the ranks

    def send(self, message: Message) -> None:
        """Send a message to the controller, from any thread."""
        assert self._connection is not None
        self._connection.send(message)

    def assign(self, task: Task) -> dict[int, Task]:
        """Assign a task its ranks, if they are free.

        Returns:
            The other tasks that run on them, by rank; if there are any, nothing is assigned.
        """
        with self._lock:
            others = {rank: self._running[rank] for rank in task.ranks if rank in self._running}
            if others:
                return others
            for rank in task.ranks:
                self._running[rank] = self._latest[rank] = task
            untold, self._untold = self._untold, []
        for notice in untold:
            task.put(notice)
        return {}

    def withdraw(self, task: Task) -> None:
        """Take its ranks from a task that has not been sent."""
        with self._lock:
            for rank in task.ranks:
                if self._running.get(rank) is task:
                    del self._running[rank]
            self._freed.notify_all()
        task.close()

    def wait_free(self, ranks: Iterable[int], limit: float) -> None:
        """Wait until none of these ranks runs anything, at most `limit` seconds."""
        chosen = set(ranks)
        with self._freed:
            self._freed.wait_for(lambda: not chosen & self._running.keys(), limit)

    def running(self, ranks: Iterable[int]) -> dict[int, Task]:
        """Return what these ranks run, without those that run nothing."""
        with self._lock:
            return {rank: self._running[rank] for rank in ranks if rank in self._running}

    def doing(self) -> list[str]:
        """Return what ranks run, in words: the cells and where, with their code."""
        with self._lock:
            running = dict(self._running)
        where = {task: [rank for rank in running if running[rank] is task] for task in running.values()}
        return [f"{self.places.describe(ranks)}: {task.describe()}\n{task.code}" for task, ranks in where.items()]

    def release(self, text: str) -> None:
        """End everything that waits for ranks, because they are gone; `text` is the reason."""
        self.widgets.close()
        self.streams.end()
        with self._lock:
            tasks, self._running = set(self._running.values()), {}
            self._freed.notify_all()
        self._gone = gone = Broken(text)
        for task in tasks:
            task.put(gone)
        for answers in self._answers.copy().values():
            answers.put(gone)
        for told in self._told.copy().values():
            told.put(gone)

    def pay(self, rank: int, size: int) -> None:
        """Note that output of a rank has been taken; credit its agent now and then."""
        with self._lock:
            owed = self._owed[rank] = self._owed.get(rank, 0) + size
            if owed < OUTPUT_CREDIT:
                return
            self._owed[rank] = 0
        self.send(Credit(rank, owed))

    def pay_item(self, item: Display | WidgetMessage) -> None:
        """Note that a rich item of a rank has been taken."""
        if item.size:
            self.send(Credit(item.rank, item.size, items=True))

    def ask(
        self,
        ranks: Sequence[int],
        question: Question[A],
        *,
        timeout: float,
        wanted: Callable[[], bool] = lambda: True,
    ) -> dict[int, A | NoAnswer]:
        """Ask the control threads of ranks.

        Args:
            timeout: Maximum seconds to wait, for ranks of this machine.
            wanted: Asked every half second whether the answers are still waited for.

        Returns:
            The answers that arrived, by rank. None arrive from ranks that have ended.
        """
        request = next(self._requests)
        answers = self._answers[request] = queue.SimpleQueue()
        try:
            if self._gone is not None:
                return {}
            self.send(ask(request, ranks, question))
            return gather(answers, request, question, len(ranks), timeout + self.slack, wanted)
        finally:
            del self._answers[request]

    def status(self) -> Status:
        """Ask the controller for the state of the ranks.

        Raises:
            SessionBroken: The controller does not answer.
        """
        answer = self._ask_controller(GetStatus(next(self._requests)), Status)
        if answer is None:
            raise SessionBroken(_NO_CONTROLLER)
        return answer

    def history(self) -> list[SetupCell]:
        """Return the cells that have run on the ranks, in their order.

        Raises:
            SessionBroken: The controller does not answer.
        """
        answer = self._ask_controller(GetCellsRun(next(self._requests)), CellsRun)
        if answer is None:
            raise SessionBroken(_NO_CONTROLLER)
        return answer.cells

    def read_log(self, **question: Any) -> LogPart:
        """Read part of what was printed; the arguments are the fields of a ReadLog.

        Raises:
            SessionError: The log does not answer.
        """
        part = self._ask_controller(ReadLog(next(self._requests), **question), LogPart)
        if part is None:
            raise SessionError(
                f"the output log has not answered for {_ANSWER_LIMIT:.0f} s: its disk may hang. "
                "Type `%distributed logs` to try again; the ranks are not affected."
            )
        return part

    def _ask_controller(self, message: GetCellsRun | GetStatus | ReadLog, kind: type[_Told]) -> _Told | None:
        """Return the controller's answer; None if there is none.

        Raises:
            SessionClosed: The ranks have ended.
        """
        told = self._told[message.request] = queue.SimpleQueue()
        try:
            if self._gone is not None:
                raise SessionClosed(self._gone.text)
            self.send(message)
            answer = told.get(timeout=_ANSWER_LIMIT)
            if isinstance(answer, Broken):
                raise SessionClosed(answer.text)
            return answer if isinstance(answer, kind) else None
        except queue.Empty:
            return None
        finally:
            del self._told[message.request]

    # --- from the ranks, in the listening thread

    def _on_message(self, message: Message) -> None:
        with self._lock:
            if self._waiting is not None and not isinstance(message, Attached | AttachRefused | Broken | Displaced):
                self._waiting.append(message)
                return
        self._on_cell(message)

    def _on_cell(self, message: Message) -> None:
        if isinstance(message, Output):  # by far the most frequent
            self._route(message)
        elif not self._handlers(message):
            self._on_life(message)

    def _table(self) -> Handlers[[]]:
        """Return what handles which message, besides output; all others are about the session's life."""
        return (
            Handlers[[]]()
            .on(Display, self._route)
            .on(Prompt, self._route)
            .on(WidgetMessage, self._route)
            .on(Reply, self._end_part)
            .on(Died, self._rank_died)
            .on(Answer, self._rank_answered)
            .on(LogPart, self._controller_answered)
            .on(Status, self._controller_answered)
            .on(CellsRun, self._controller_answered)
            .on(Notice, self.notify)
            .on(Remark, self._tell_cell)
            .on(Recovered, self._tell_cell)
            .on(Look, lambda look: observers.node_looked_at(self.key, look))
            .on(Renumbered, self._renumber)
        )

    def _rank_answered(self, message: Answer) -> None:
        if (answers := self._answers.get(message.request)) is not None:
            answers.put(message)
        else:
            self.streams.answered(message)

    def _controller_answered(self, message: LogPart | Status | CellsRun) -> None:
        if (told := self._told.get(message.request)) is not None:
            told.put(message)

    def _renumber(self, message: Renumbered) -> None:
        """Know ranks by other numbers. Those that were given up are forgotten."""
        numbers = message.numbers
        with self._lock:
            self.names = {numbers[rank]: names for rank, names in self.names.items() if rank in numbers}
            tasks = set(self._latest.values())
            self._latest = {numbers[rank]: task for rank, task in self._latest.items() if rank in numbers}
            self.dead = {numbers[rank]: died for rank, died in self.dead.items() if rank in numbers}
            self._owed = {}  # the controller has had all paid
        self.place(message.ranks)
        for task in tasks:  # after what ranks have sent under their earlier numbers
            if not task.put(message):
                self.put_late(task, message)
        self.streams.renumber(numbers)
        if any(before != now for before, now in numbers.items()):  # a widget knows its rank by its number
            self.widgets.close()
            self.widgets = WidgetProxies(self.send)
        self._on_life(message)

    def notify(self, message: Notice) -> None:
        """Show a line in the running cells, else below the latest, else in the first that starts."""
        with self._lock:
            tasks = set(self._running.values())
            latest = next(iter(self._latest.values()), None)
            if not tasks and latest is None:
                self._untold.append(message)
                return
        for task in tasks:
            task.put(message)
        if not tasks:
            self.put_late(latest, message)

    def _route(self, message: Output | Display | Prompt | WidgetMessage) -> None:
        task = self._latest.get(message.rank)
        if task is None or not task.put(message):
            self.put_late(task, message)

    def _tell_cell(self, message: Remark | Recovered) -> None:
        """Pass on a message about a cell as a whole. After the cell's end it becomes a line below it."""
        if isinstance(message, Recovered):
            self.generation = message.generation
        with self._lock:
            task = next((task for task in self._latest.values() if task.serial == message.serial), None)
        if task is not None and not task.put(message) and message.text:
            self.put_late(task, message if isinstance(message, Remark) else Notice(message.text))

    def _end_part(self, message: Reply) -> None:
        with self._lock:
            task = self._running.get(message.rank)
            if task is None or task.serial != message.serial:
                return
            del self._running[message.rank]
            self._freed.notify_all()
        if message.names is not None:
            self.names[message.rank] = message.names
        if not task.put(message) and message.parcel is not None:  # nobody waits any more for what the rank has packed
            self.send(Ask(0, [message.rank], Release(message.serial)))

    def _rank_died(self, message: Died) -> None:
        with self._lock:
            known = message.rank in self.dead
            self.dead[message.rank] = message
            task = self._running.pop(message.rank, None)
            self._freed.notify_all()
        self.streams.died(message.rank)
        if task is not None and task.put(message):
            return
        if not known and message.rank not in self._replacing:
            how = f"{self.places.describe([message.rank])} died between cells: {describe_death(message)}."
            goes_on = "`%distributed shrink` continues with the other ranks, `%distributed restart` starts fresh ranks"
            if message.machine_lost:
                goes_on = (
                    "`%distributed heal` replaces it on another machine, `%distributed shrink` continues with the "
                    "other ranks"
                )
            heals = not message.cause  # else the others have died of it, too
            what_next = "`%distributed heal` replaces it" if heals else goes_on
            self.put_late(self._latest.get(message.rank), Notice(f"{how} {what_next}."))

    # --- messages that arrive after their cell has ended

    def put_late(self, task: TaskRecord | None, message: Message) -> None:
        """Have a message handled that came after the end of its cell."""
        with self._lock:
            if self._late is None:
                self._late = queue.SimpleQueue()
                self._late_thread = threading.Thread(
                    target=self._show_late, args=(self._late,), name="nbdist-late", daemon=True
                )
                self._late_thread.start()
            self._late.put((task, message))

    def end_late(self) -> None:
        """Show the rest of the late output and end its thread: the ranks have ended."""
        with self._lock:
            late, self._late = self._late, None
        if late is not None and self._late_thread is not None:
            late.put(None)
            self._late_thread.join(_LATE_LIMIT)

    def _show_late(self, messages: queue.SimpleQueue[_Late | None]) -> None:
        """Show late messages below their cells until no more come."""
        dues: dict[TaskRecord, float] = {}  # when tasks have more to show
        while True:
            now = time.monotonic()
            for task in [task for task, due in dues.items() if due <= now]:
                self._show_late_of(task, None, dues)
            try:
                wait = max(0.0, min(dues.values()) - time.monotonic()) if dues else None
                entry = messages.get(timeout=wait)
            except queue.Empty:
                continue
            if entry is None:
                for task in list(dues):
                    self._show_late_of(task, None, dues, ahead=_LATE_LIMIT)
                return
            late, message = entry
            if isinstance(message, WidgetMessage):
                self.widgets.relay(message)
            elif isinstance(message, Prompt):
                prompts.refuse(self.send, message, prompts.OVER)
            elif late is not None:
                self._show_late_of(late, message, dues)
            if isinstance(message, Output):
                self.pay(message.rank, len(message.data))
            elif isinstance(message, WidgetMessage) or (isinstance(message, Display) and late is None):
                self.pay_item(message)

    def _show_late_of(
        self, task: TaskRecord, message: Message | None, dues: dict[TaskRecord, float], ahead: float = 0.0
    ) -> None:
        """Show a message, and what is due within `ahead` seconds."""
        now = time.monotonic() + ahead
        dues.pop(task, None)
        try:
            due = task.context.run(task.show_late, message, now)
        except Exception:  # nothing shown may end this thread: ranks wait until their output is paid for
            traceback.print_exc()
            return
        if due is not None:
            dues[task] = now + due
