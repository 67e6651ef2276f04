"""Does what visitors want from a session: runs their cells beside the notebook's, and says how cells and ranks are.

Called in threads of the visitors' own. What is shown of their cells is shown in the notebook, too.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Protocol

from nbdist import shells
from nbdist.base.checks import check_seconds
from nbdist.base.ranks import describe_ranks
from nbdist.base.text import counted
from nbdist.client.ranks import observers
from nbdist.client.ranks.background import BackgroundCell
from nbdist.client.ranks.rank_set import RankSet
from nbdist.client.ranks.task import Task
from nbdist.client.ranks.task_record import CellOptions
from nbdist.client.reports import stack_report
from nbdist.client.reports.logs import CellLog
from nbdist.client.requests.compared_variables import describe_variables
from nbdist.client.requests.status import look_at_flight, look_at_stacks, status_of
from nbdist.client.session.session import Session, rank_set_of
from nbdist.errands.cell_records import CellRecord, CellRecords
from nbdist.errands.queued_cells import Later, QueuedCells
from nbdist.errands.transcripts import Transcripts, page_of
from nbdist.errors import NbdistError, RankError, SessionClosed, UsageError
from nbdist.wire.messages.errands import (
    AnyErrand,
    CellNews,
    ErrandDone,
    HealRanks,
    InterruptCells,
    LookAtCell,
    LookAtRanks,
    RankNews,
    ReadFlight,
    ReadLogs,
    ReadMemory,
    ReadStacks,
    ReadVariables,
    ReadWhy,
    RunCell,
    SaveRanks,
    SessionNews,
    StopNews,
    StopRanks,
    TextPage,
)
from nbdist.wire.messages.output import Notice

FIRST_NUMBER = 10_001  # of a visitor's cell, so that no cell of the notebook has the same
_LONGEST_WAIT = 30.0
_SHOWN_CODE = 20  # lines of a cell that are shown before its output
_LAST = 5  # cells that have ended, in a list
_MOST_COLLECTIVES = 50


class DeskVerbs(Protocol):
    """What a desk needs of the magics."""

    def why(self) -> str:
        """Return why the last cell's steps took as long as they did."""

    def held_memory(self, session: Session, ranks: str | None) -> str:
        """Return what the memory of ranks is held as."""


class ErrandDesk:
    """Does the errands of one session.

    Args:
        session: The session, which is not kept alive by this.
        verbs: The magics.
    """

    def __init__(self, session: Session, verbs: DeskVerbs) -> None:
        rank_set = rank_set_of(session)
        self._session = weakref.ref(session)
        self._traffic = rank_set.traffic
        self._verbs = verbs
        self._shows = shells.current() is not None
        self._user = "notebook" if self._shows else "an earlier client"
        running = set(self._traffic.running(info.rank for info in rank_set.ranks).values())
        self._records = CellRecords(self._traffic, self._user, running)
        weakref.finalize(session, observers.subscribe(self._records))
        self._queue = QueuedCells(self._traffic, self._begin)
        self._transcripts = Transcripts(self._traffic.read_log)
        self._reading = threading.Lock()  # of transcripts
        known = (cell.number for cell in self._traffic.history())
        self._numbers = itertools.count(max(FIRST_NUMBER - 1, max(known, default=0)) + 1)

    def do(self, request: AnyErrand, who: str, later: Callable[[Later], object]) -> ErrandDone:
        """Do what is asked, and return what it has brought, or why it can't be done.

        Args:
            request: What is asked.
            who: Who asks, for people.
            later: Takes what is to be done soon, but not before the answer is on its way.
        """
        try:
            return self._do(request, who, later)
        except RankError as error:
            return ErrandDone(0, error=error.report)
        except NbdistError as error:
            return ErrandDone(0, error=str(error))

    def _do(self, request: AnyErrand, who: str, later: Callable[[Later], object]) -> ErrandDone:
        session = self._session()
        if session is None:
            raise SessionClosed("this session has ended")
        rank_set = rank_set_of(session)
        rank_set.check_open()
        match request:
            case RunCell():
                return ErrandDone(0, cell=self._run(rank_set, request, who, later))
            case LookAtCell():
                return ErrandDone(0, cell=self._look_at_cell(request))
            case InterruptCells():
                return ErrandDone(0, stopped=self._interrupt(rank_set, request, who))
            case LookAtRanks(memory=memory):
                return ErrandDone(0, session=self._look_at_ranks(session, memory=memory))
            case SaveRanks(directory=directory, keep=keep, stop=stop):
                return _text(str(session.save(directory, keep=keep, stop=stop)))
            case HealRanks(ranks=ranks, kill=kill):
                return _text(str(session.heal(ranks, kill=kill, progress=None)))
            case StopRanks():
                self._traffic.notify(Notice(f"the session was stopped by {who}"))
                session.close()
                return _text(f"{counted(len(session.ranks), 'rank')} of session {session.name} stopped")
        return self._read(session, request)

    def _read(self, session: Session, request: AnyErrand) -> ErrandDone:
        rank_set = rank_set_of(session)
        match request:
            case ReadStacks(ranks=ranks):
                return _text(stack_report.render(look_at_stacks(rank_set, ranks), self._traffic.places))
            case ReadFlight(ranks=ranks, count=count):
                return _text(look_at_flight(rank_set, ranks, max(1, min(count, _MOST_COLLECTIVES))))
            case ReadMemory(ranks=ranks):
                return _text(self._verbs.held_memory(session, ranks))
            case ReadWhy():
                return _text(self._verbs.why())
            case ReadVariables(name=name, ranks=ranks):
                return _text(describe_variables(rank_set, _living(rank_set, ranks), name))
            case ReadLogs():
                return ErrandDone(0, text=self._logs(rank_set, request))
        raise UsageError(f"this session does not know what a {type(request).__name__} is")

    # --- cells

    def _run(self, rank_set: RankSet, request: RunCell, who: str, later: Callable[[Later], object]) -> CellNews:
        check_seconds("timeout", request.timeout)
        if not request.code.strip():
            raise UsageError("there is no code to run: pass the text of a cell")
        ranks = rank_set.choose(request.ranks)
        record = CellRecord(next(self._numbers), who, request.code, ranks, timeout=request.timeout)
        record.ranks_set = rank_set.sets_started
        if self._shows:
            record.headline = _headline(record)
        self._records.add(record)
        begin = self._queue.put(record)
        if begin is not None:
            later(begin)
        return self._news(record)

    def _begin(self, record: CellRecord) -> None:
        """Begin a cell, in the thread of who wants it or of the queue."""
        session = self._session()
        if session is None:
            raise SessionClosed("the session has ended")
        if rank_set_of(session).sets_started != record.ranks_set:
            raise SessionClosed("the ranks were restarted before its turn: nothing of it has run")
        code, offset = shells.from_first_line(record.code)
        options = CellOptions(record.number, offset, show=self._shows, keep_displays=True)
        task = rank_set_of(session).submit("cell", code, record.ranks, options)
        BackgroundCell(task, record.timeout, session)

    def _look_at_cell(self, request: LookAtCell) -> CellNews:
        record = self._record(request.cell)
        record.over.wait(min(request.wait, _LONGEST_WAIT))
        if request.rank is not None and request.rank not in record.ranks:
            raise UsageError(
                f"rank {request.rank} did not run cell {record.number}; {describe_ranks(record.ranks)} did"
            )
        over = record.over.is_set()  # before the log is read
        ranks = record.ranks if request.rank is None else [request.rank]
        page, note = self._page(record.number, ranks, request.since, over=over)
        return self._news(record, page, note)

    def _page(self, cell: int, ranks: Sequence[int], since: int, *, over: bool) -> tuple[TextPage, str]:
        with self._reading:
            return self._transcripts.of(cell, ranks, self._traffic.places).page(since, over=over)

    def _news(self, record: CellRecord, page: TextPage | None = None, note: str = "") -> CellNews:
        brief = record.brief()
        page = page or TextPage("")
        task = record.task
        waits = {str(rank): text for rank, text in dict(task.waits).items()} if task is not None else {}
        notes = [note] if note else []
        if record.timed_out:
            notes.append(f"interrupted because it was not done after {record.timeout:g} s (timeout)")
        if brief.state == "queued":
            notes.append("; ".join(["it waits until its ranks are free", *map(_first_line, self._traffic.doing())]))
        return CellNews(
            brief.cell,
            brief.state,
            brief.by,
            brief.ranks,
            brief.code,
            brief.seconds,
            page.text,
            page.next,
            page.left,
            waits,
            record.failed_rank,
            record.error,
            record.failure,
            record.values,
            record.displays,
            "; ".join(notes),
        )

    def _record(self, number: int) -> CellRecord:
        """Return what is known of a cell, if only that it has run.

        Raises:
            UsageError: It has not.
        """
        if (record := self._records.get(number)) is not None:
            return record
        ran = [cell for cell in self._traffic.history() if cell.number == number]
        if not ran:
            known = ", ".join(str(record.number) for record in self._records.all()[-_LAST:]) or "none yet"
            raise UsageError(f"there is no cell {number} in this session. Known cells: {known}")
        record = CellRecord(number, self._user, ran[-1].code, ran[-1].ranks)
        record.end("ended")
        self._records.add(record)
        return record

    def _interrupt(self, rank_set: RankSet, request: InterruptCells, who: str) -> StopNews:
        chosen = rank_set.choose(request.ranks, living=False)
        if request.cell is not None:
            only = self._record(request.cell)
            tasks = {only.task} if only.task is not None else set()
            dropped = self._queue.drop(lambda record: record is only)
        else:
            tasks = set(rank_set.traffic.running(chosen).values())
            dropped = self._queue.drop(lambda record: bool(set(record.ranks) & set(chosen)))
        for task in tasks:
            if isinstance(task, Task):
                task.put(Notice(f"interrupted by {who}"))
                task.interrupt(chosen, now=request.now)
        return StopNews(sorted(task.number for task in tasks), [record.number for record in dropped])

    def _look_at_ranks(self, session: Session, *, memory: bool) -> SessionNews:
        rows = [
            RankNews(
                row["rank"],
                row["node"],
                row["pid"],
                row["device"],
                row["state"],
                row["doing"],
                row["memory"],
                row["device_memory"],
            )
            for row in status_of(rank_set_of(session), memory=memory)
        ]
        records = self._records.all()
        going = [record for record in records if not record.over.is_set()]
        ended = [record for record in records if record.over.is_set()][-_LAST:]
        cells = [record.brief() for record in (*going, *ended)]
        return SessionNews(session.name, session.backend, rows, cells)

    def _logs(self, rank_set: RankSet, request: ReadLogs) -> TextPage:
        ranks = rank_set.choose(None if request.rank is None else request.rank, living=False)
        log = CellLog(self._traffic.read_log, request.cell)
        if not request.words:
            record = self._records.get(log.number)
            over = record is None or record.over.is_set()
            page, note = self._page(log.number, ranks, request.since, over=over)
            return TextPage(f"({note})\n{page.text}", page.next, page.left) if note else page
        found = [f"[{rank}] {line}" for rank in ranks for line in log.search(rank, request.words)[0].splitlines()]
        return page_of("\n".join(found), request.since)


def _text(text: str) -> ErrandDone:
    return ErrandDone(0, text=page_of(text))


def _first_line(text: str) -> str:
    return text.partition("\n")[0]


def _living(rank_set: RankSet, ranks: str | None) -> list[int]:
    return rank_set.choose(rank_set.living() if ranks is None else ranks)


def _headline(record: CellRecord) -> str:
    lines = record.code.strip().splitlines()
    shown = lines[:_SHOWN_CODE] + ([f"… {len(lines) - _SHOWN_CODE} more lines …"] if len(lines) > _SHOWN_CODE else [])
    code = "\n".join(f"    {line}" for line in shown)
    return f"{record.by} runs cell {record.number} on {describe_ranks(record.ranks)}:\n{code}"
