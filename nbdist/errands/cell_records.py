"""What is known of each cell of a session, whoever has started it: its state, what failed, its values.

Kept from the first errand on. Small: tasks and their output are let go when they have ended.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass, field

from nbdist.base.ranks import RankNames, format_ranks
from nbdist.client.ranks.observers import Observer
from nbdist.client.ranks.task import Task
from nbdist.client.ranks.task_record import TaskRecord
from nbdist.client.ranks.traffic import Traffic
from nbdist.client.reports import report
from nbdist.errands.transcripts import plain, without_middle
from nbdist.wire.messages.errands import CellBrief, CellState
from nbdist.wire.messages.output import Notice

_RECORDS = 500  # that are kept
_LINE = 80  # characters of a cell's first line
_VALUE = 2_000  # characters of a value, or of a display
_DISPLAYS = 10
_STATES: dict[str, CellState] = {"ok": "done", "error": "failed", "died": "failed", "interrupted": "interrupted"}


@dataclass
class CellRecord:
    """A cell.

    Attributes:
        number: Its number.
        by: Who has started it.
        code: What it runs.
        ranks: Where.
        state: Its state.
        timeout: Seconds after which its ranks are interrupted.
        ranks_set: Which set of the session's ranks is meant: its number.
        headline: Shown where the cell's output is shown, before it.
        task: What runs it, until it has ended.
        over: Set when it has ended.
        failed_rank: The rank that failed first.
        error: What that has raised.
        failure: The report.
        values: The value of the last expression, by ranks.
        displays: What it has displayed, as text.
    """

    number: int
    by: str
    code: str
    ranks: list[int]
    state: CellState = "queued"
    timeout: float | None = None
    ranks_set: int = 0
    headline: str = ""
    task: TaskRecord | None = None
    over: threading.Event = field(default_factory=threading.Event)
    failed_rank: int | None = None
    error: str = ""
    failure: str = ""
    values: dict[str, str] = field(default_factory=dict)
    displays: list[str] = field(default_factory=list)
    _began: float = field(default_factory=time.monotonic)
    _ended: float | None = None

    @property
    def seconds(self) -> float:
        """For how long it runs, or has run; of one that waits: for how long it has waited."""
        return round((time.monotonic() if self._ended is None else self._ended) - self._began, 3)

    @property
    def line(self) -> str:
        """The first line of its code."""
        return next((line.strip() for line in self.code.splitlines() if line.strip()), "")[:_LINE]

    @property
    def timed_out(self) -> bool:
        """Whether it was interrupted because it took too long."""
        return self.state == "interrupted" and self.timeout is not None and self.seconds >= self.timeout

    def brief(self) -> CellBrief:
        """Return it as a line of a list."""
        return CellBrief(self.number, self.state, self.by, format_ranks(self.ranks), self.seconds, self.line)

    def begin(self, task: TaskRecord) -> None:
        """Note what runs it."""
        self.task, self.state = task, "running"
        self._began = task.started
        if self.headline and isinstance(task, Task):
            task.put(Notice(self.headline))

    def end(self, state: CellState, failure: str = "") -> None:
        """Note how it has ended."""
        self.state, self.task = state, None
        self.failure = self.failure or failure
        self._ended = time.monotonic()
        self.over.set()

    def conclude(self, names: RankNames) -> None:
        """Note what its task has ended with."""
        task = self.task
        if task is None:
            return
        if task.broken is not None:
            self.end("lost", task.broken)
            return
        if task.failures:
            finished = [rank for rank in task.ranks if rank not in task.failures]
            repaired = task.recovered.text if task.recovered is not None else ""
            error = report.build(task.failures.values(), finished, recovered=repaired, names=names)
            self.failure = without_middle(plain(error.report))
            if error.first is not None:
                self.failed_rank, self.error = error.first.rank, error.first.name
        self.values, self.displays = _values(task), _displays(task)
        self.end(_STATES.get(task.status, "failed"))


def _values(task: TaskRecord) -> dict[str, str]:
    """Return the values of the last expression, equal ones once."""
    groups: dict[str, list[int]] = {}
    for rank, part in task.result.items():
        if part.result is not None:
            groups.setdefault(without_middle(part.result, _VALUE), []).append(rank)
    return {format_ranks(ranks): value for value, ranks in groups.items()}


def _displays(task: TaskRecord) -> list[str]:
    """Return the text of displays, equal ones of ranks once."""
    groups: dict[str, list[int]] = {}
    for rank, part in task.result.items():
        texts = [str(data.get("text/plain", "")) for data in part.outputs]
        if texts and texts[-1] == part.result:
            texts.pop()
        for text in dict.fromkeys(filter(None, texts)):
            groups.setdefault(plain(text), []).append(rank)
    shown = list(groups.items())[:_DISPLAYS]
    left_out = [f"… {len(groups) - _DISPLAYS} more displays …"] if len(groups) > _DISPLAYS else []
    return [*(f"[{format_ranks(ranks)}] {without_middle(text, _VALUE)}" for text, ranks in shown), *left_out]


class CellRecords(Observer):
    """The records of a session's cells, the oldest first.

    Args:
        traffic: The session's.
        user: Who has started those that nobody else has.
        running: What runs already.
    """

    def __init__(self, traffic: Traffic, user: str, running: Iterable[TaskRecord]) -> None:
        self._traffic = traffic
        self._user = user
        self._records: dict[int, CellRecord] = {}
        self._lock = threading.Lock()
        for task in running:
            self.cell_began(task)

    def add(self, record: CellRecord) -> None:
        """Note a cell that is to run."""
        with self._lock:
            self._records[record.number] = record
            over = [number for number, known in self._records.items() if known.over.is_set()]
            for number in over[: max(0, len(self._records) - _RECORDS)]:
                del self._records[number]

    def get(self, number: int) -> CellRecord | None:
        """Return a cell's record; None: nothing is known of it."""
        return self._records.get(number)

    def all(self) -> list[CellRecord]:
        """Return all records."""
        with self._lock:
            return list(self._records.values())

    def cell_began(self, task: TaskRecord) -> None:
        """Note who runs. A cell of the kernel may run code on ranks several times."""
        if not task.runs_users_code or task not in self._traffic.running(task.ranks).values():
            return
        record = self._records.get(task.number)
        if record is None or record.task is not None or record.over.is_set():
            record = CellRecord(task.number, self._user, task.code, task.ranks)
            self.add(record)
        record.begin(task)

    def cell_ended(self, task: TaskRecord) -> None:
        """Note how it has ended."""
        record = self._records.get(task.number)
        if record is not None and record.task is task:
            record.conclude(self._traffic.places)
