"""What the buttons of a page do: the verbs of `%distributed` that may come while a cell runs.

They run in the thread of the page, not in the main one, and return text instead of printing it.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from typing import Any, Protocol, TypeAlias

from nbdist.client.ranks import observers
from nbdist.client.ranks.rank_set import RankSet
from nbdist.client.ranks.task import Task
from nbdist.client.reports import report, stack_report
from nbdist.client.reports.logs import CellLog
from nbdist.client.requests.status import look_at_stacks
from nbdist.client.session.current import current_session, get_session
from nbdist.client.session.session import rank_set_of
from nbdist.devices import visible_gpus
from nbdist.errors import NbdistError, UsageError
from nbdist.lab.cells_seen import CellsSeen, CellStepsSeen
from nbdist.lab.variable_rows import entry_rows, figure_rows, gap, variable_rows
from nbdist.wire.pages.page_messages import (
    CellOnRanks,
    DifferenceRequest,
    DraftRequest,
    EntriesRequest,
    EstimateRequest,
    FiguresRequest,
    HealRequest,
    InterruptNowRequest,
    InterruptRequest,
    LogPage,
    LogRequest,
    PageReply,
    PageRequest,
    PlanDraft,
    PlanField,
    PlanRequest,
    RestartRequest,
    SessionState,
    StacksRequest,
    StateRequest,
    StopRequest,
    VariablesRequest,
    WhyRequest,
)

_COLORS = re.compile(r"\x1b\[[0-9;]*m")

Brought: TypeAlias = str | dict[str, Any]  # text to read, or other attributes of a PageReply


class PlanVerbs(Protocol):
    """What the notebook's `%distributed plan` can do, for a form."""

    def fields(self) -> list[PlanField]:
        """Return all settings, with the current plan's values."""

    def draft(self, settings: Mapping[str, str]) -> PlanDraft:
        """Return the line that changes these settings, or raise what that line would raise."""

    def estimate(self, settings: Mapping[str, str], model: str, batch: str) -> str:
        """Return the memory of a training step on each rank if these settings were changed."""


class NotebookVerbs(Protocol):
    """The notebook's magics, as far as a page needs them."""

    @property
    def auto(self) -> bool:
        """Whether every cell runs on all ranks."""

    @property
    def plan_form(self) -> PlanVerbs:
        """The plan, as a form needs it."""

    def stop(self) -> str:
        """End the session, and return what to say."""

    def restart(self) -> str:
        """Replace the ranks by fresh ones, and return what to say."""

    def why(self) -> str:
        """Return why the last cell's steps took as long as they did."""


class PageActions:
    """Does what pages ask for.

    Args:
        notebook: The notebook's magics.
        cells: The notebook's cells that ran on ranks.
    """

    def __init__(self, notebook: NotebookVerbs, cells: CellsSeen) -> None:
        self._notebook = notebook
        self._cells = cells
        self._gpus = len(visible_gpus())
        self._steps = CellStepsSeen()
        observers.subscribe(self._steps)

    def answer(self, request: PageRequest) -> PageReply:
        """Do what is asked, and return what it has brought, or why it can't be done."""
        try:
            brought = self._do(request)
        except NbdistError as error:
            return PageReply(request.id, self.state(), str(error), failed=True)
        if isinstance(brought, str):
            return PageReply(request.id, self.state(), brought)
        return PageReply(request.id, self.state(), **brought)

    def state(self) -> SessionState:
        """Return how the notebook's session is, without asking any rank."""
        session = current_session()
        if session is None or session.closed:
            broken = "" if session is None else session.broken
            stopped = session is not None and rank_set_of(session).stopped
            auto = self._notebook.auto
            return SessionState(0, [], [], broken, [], auto, self._gpus, "", stopped)
        rank_set = rank_set_of(session)
        running = rank_set.traffic.running(info.rank for info in session.ranks)
        cells = [
            self._cell(task, [rank for rank in running if running[rank] is task]) for task in set(running.values())
        ]
        return SessionState(
            len(session.ranks),
            sorted({info.device for info in session.ranks}),
            sorted(rank_set.traffic.dead),
            "",
            sorted(cells, key=lambda cell: cell.number),
            self._notebook.auto,
            self._gpus,
            session.name,
        )

    def _do(self, request: PageRequest) -> Brought:
        match request:
            case StateRequest():
                return ""
            case InterruptRequest():
                return _interrupt(now=False)
            case InterruptNowRequest():
                return _interrupt(now=True)
            case StacksRequest():
                return _stacks()
            case WhyRequest():
                return self._notebook.why()
            case HealRequest():
                return str(get_session().heal(progress=None))
            case RestartRequest():
                return self._notebook.restart()
            case StopRequest():
                return self._notebook.stop()
            case LogRequest():
                return {"log": self._log(request)}
            case VariablesRequest(name=name):
                return {"variables": variable_rows(name)}
            case EntriesRequest(name=name):
                rows, left_out = entry_rows(name)
                return {"variables": rows, "text": left_out}
            case FiguresRequest(name=name):
                return {"figures": figure_rows(name)}
            case DifferenceRequest(name=name, ranks=ranks):
                return gap(name, ranks)
            case PlanRequest():
                return {"plan": self._notebook.plan_form.fields()}
            case DraftRequest(settings=settings):
                return {"draft": self._notebook.plan_form.draft(settings)}
            case EstimateRequest(settings=settings, model=model, batch=batch):
                return self._notebook.plan_form.estimate(settings, model, batch)

    def _log(self, request: LogRequest) -> LogPage:
        rank_set = rank_set_of(get_session())
        (rank,) = rank_set.choose(request.ranks, living=False)
        cell, doubt = self._cells.find(request.id_of_cell, request.cell, request.code)
        failure = self._cells.failure(cell, rank)
        text, following = _printed(rank_set, cell, rank, request, failed=failure is not None)
        if doubt and request.position == 0 and not request.words:
            text = f"{doubt} Its log:\n{text}"
        if failure is not None and following is None:
            text = _joined(text, _lines_with(request.words, report.of_rank(failure, rank_set.traffic.places)))
        return LogPage(text, following)

    def _cell(self, task: Task, busy: list[int]) -> CellOnRanks:
        count, seconds = len(task.ranks), time.monotonic() - task.started
        return CellOnRanks(task.number, count, count - len(busy), seconds, self._steps.of(task.number, busy))


def _interrupt(*, now: bool) -> str:
    reached = get_session().interrupt(now=now)
    return "" if reached else "nothing to interrupt: these ranks are idle"


def _stacks() -> str:
    rank_set = rank_set_of(get_session())
    return stack_report.render(look_at_stacks(rank_set, None), rank_set.traffic.places)


def _printed(rank_set: RankSet, cell: int, rank: int, request: LogRequest, *, failed: bool) -> tuple[str, int | None]:
    """Return a part of what a rank has printed, or the lines with what is searched, and where the next one begins."""
    try:
        log = CellLog(rank_set.traffic.read_log, cell)
    except UsageError:
        if not failed:
            raise
        return "", None  # nobody printed anything before it failed
    if request.words:
        return log.search(rank, request.words, request.position)
    return log.page(rank, request.position)


def _lines_with(words: str, text: str) -> str:
    lines = (line for line in text.splitlines() if words.lower() in _COLORS.sub("", line).lower())
    return "\n".join(lines)


def _joined(printed: str, text: str) -> str:
    """Return both, the second on lines of its own."""
    return printed + ("\n" if printed and text and not printed.endswith("\n") else "") + text
