"""Takes a living session over from a client that is gone, or that gives it up; and leaves one to others."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from nbdist.base.ranks import describe_ranks, format_ranks
from nbdist.base.text import counted, duration, size, span
from nbdist.client.ranks.background import rendered
from nbdist.client.ranks.rank_set import RankSet
from nbdist.client.ranks.task import PastOutput, Task
from nbdist.client.ranks.task_record import CellOptions
from nbdist.client.reports.report import describe_death
from nbdist.client.start.connection import Connection, Reachable, own_place
from nbdist.errors import NbdistError, UsageError
from nbdist.visits import Found, of_this_machine, reach, stop
from nbdist.wire.messages.handover import Attach, Attached, AttachRefused, UnseenCell

LOST = "not restored: the previous notebook's widgets, results, captures, and measurements"


@dataclass(frozen=True)
class Attachment:
    """What a session was like when this client took it over. It prints as a few lines.

    Attributes:
        name: The session's.
        seconds: What taking it over took.
        away: Seconds that it was without a client.
        running: The cells that run.
        ended: The cells that have ended meanwhile, or just before.
        notices: Lines that no client has seen.
        text: What it prints.
    """

    name: str
    seconds: float
    away: float
    running: list[Task] = field(default_factory=list)
    ended: list[tuple[Task, bool]] = field(default_factory=list)
    notices: list[str] = field(default_factory=list)
    text: str = ""

    def __str__(self) -> str:
        return self.text


def take_over(rank_set: RankSet, name: str | None, *, take: bool) -> tuple[Attached, Attachment]:
    """Have a set of ranks, which has none, take over those of a session.

    Args:
        rank_set: The set.
        name: The session's name, or its beginning; None: the only one that has no client.
        take: Whether also from a client that is there.

    Raises:
        UsageError: There is no such session, or it can't be taken over; nothing has changed.
        SessionBroken: It does not answer.
    """
    began = time.monotonic()
    found = choose(name, take=take)
    assert found.description is not None
    connection = Connection(found=Reachable(found.key_file, found.description.controller))
    answer = rank_set.request_attach(connection, Attach(os.getpid(), *own_place(), take))
    if isinstance(answer, AttachRefused):
        raise UsageError(f"session {found.name}: {answer.text}")
    tasks = [_task_of(rank_set, cell) for cell in answer.cells]
    for task, cell in zip(tasks, answer.cells, strict=True):
        _show_past(task, cell)
    rank_set.adopt(answer, tasks)
    running = [task for task, cell in zip(tasks, answer.cells, strict=True) if _runs(cell)]
    ended = [(task, cell.watched) for task, cell in zip(tasks, answer.cells, strict=True) if not _runs(cell)]
    seconds = time.monotonic() - began
    text = _describe(rank_set, found.name, answer, running, seconds)
    return answer, Attachment(found.name, seconds, answer.away, running, ended, answer.notices, text)


def choose(name: str | None, *, take: bool) -> Found:
    """Return the session that is meant.

    Raises:
        UsageError: There is none, or several; the text names them.
    """
    if name is not None:
        return reach(name)
    others = [each for each in of_this_machine() if not each.is_own]
    lonely = [each for each in others if each.lonely]
    own = [each for each in lonely if each.is_of(*own_place())]
    candidates = own or lonely or (others if take else [])
    if len(candidates) == 1:
        return candidates[0]
    if candidates:
        names = ", ".join(each.name for each in candidates)
        raise UsageError(
            f"there are {counted(len(candidates), 'session')} ({names}): give the name of one, as in "
            f"`attach {candidates[0].name}`. `nbdist ls` describes them"
        )
    if others:
        held = "; ".join(f"{each.name} belongs to {each.holder}" for each in others)
        raise UsageError(f"every session is in use: {held}. `attach NAME --take` takes one over")
    raise UsageError("there is no session to attach to: you have none on this machine. `%distributed start` starts one")


def settle_previous(*, replace: bool, say: Callable[[str], None]) -> None:
    """Before a start: end the session that a restart of this kernel has left, and report others without a client.

    Args:
        replace: Whether to end also one that a crash has left.
        say: Shows a line.

    Raises:
        UsageError: A crash of this notebook's kernel has left one.
    """
    for each in of_this_machine(but_of=os.getpid()):
        own, name = each.is_of(*own_place()), each.name
        if not each.lonely:
            continue
        if own and (replace or each.left == "restarted"):
            stop([name])
            say(
                f"the previous session ({each.holds}) was stopped; to keep it, type `%distributed attach` instead of "
                "`start`"
            )
        elif own and each.left == "crashed":
            raise UsageError(
                f"the previous session of this notebook holds {each.holds}: `%distributed attach` brings it back, "
                "`%distributed start --replace` ends it"
            )
        else:
            say(
                f"another session, which no notebook uses, holds {each.holds}: `%distributed attach {name}` takes it "
                f"over, `nbdist stop {name}` ends it"
            )


def _task_of(rank_set: RankSet, cell: UnseenCell) -> Task:
    options = CellOptions(cell.number, show=True, keep=True)
    task = Task(rank_set.traffic, cell.serial, cell.ranks, cell.code, options, cell.kind)
    task.started -= cell.seconds
    return task


def _runs(cell: UnseenCell) -> bool:
    return bool(set(cell.ranks) - {end.rank for end in cell.ends if hasattr(end, "rank")})


def _show_past(task: Task, cell: UnseenCell) -> None:
    """Hand a task what was printed while its client was another, or the end of it."""
    if not _runs(cell) and cell.watched:
        return  # it was shown
    shown = sum(len(output.data) for output in cell.output)
    if hidden := cell.printed - shown:
        task.put(PastOutput(None, f"{size(hidden)} of earlier output are not shown here; {_all_of(task.number)}"))
    for output in cell.output:
        task.put(PastOutput(output))


def _all_of(number: int) -> str:
    return f"`%distributed logs --cell {number} --save FILE` writes everything"


def _describe(rank_set: RankSet, name: str, attached: Attached, running: Sequence[Task], seconds: float) -> str:
    devices = ", ".join(sorted({info.device for info in attached.ranks}))
    group = f"process group {attached.backend}" if attached.backend != "none" else "no process group"
    alone = f", which no notebook had used for {span(attached.away)}" if attached.away else ""
    count = counted(len(attached.ranks), "rank")
    lines = [f"attached to session {name}{alone}: {count} on {devices}; {group} ({duration(seconds)})"]
    for rank, died in sorted(rank_set.traffic.dead.items()):
        lines.append(f"rank {rank} has died ({describe_death(died)}): `%distributed heal` replaces it")
    history = [f"the last cell was {attached.last}"] if attached.last else []
    if attached.setup:
        history.append(f"setup cells: {format_ranks(attached.setup)}")
    if history:
        lines.append("; ".join(history))
    for task in running:
        what = f"cell {task.number}" if task.kind == "cell" else f"{task.kind} of {task.code}"
        began = f"for {span(time.monotonic() - task.started)}"
        lines.append(
            f"{what} has been running on {describe_ranks(task.ranks)} {began}: its output follows. "
            "`%distributed interrupt` stops it"
        )
    lines.append(LOST)
    return "\n".join(lines)


def conclude(ended: Sequence[tuple[Task, bool]], say: Callable[[str], None]) -> None:
    """Show how cells have ended that no client has seen.

    Args:
        ended: The cells, and whether a client was there.
        say: Shows a line.
    """
    for task, watched in ended:
        name = f"cell {task.number}" if task.kind == "cell" else f"{task.kind} of {task.code}"
        if not watched:
            say(f"{name} ended while no notebook was attached:")
        try:
            task.wait()
        except (NbdistError, KeyboardInterrupt) as error:
            say(rendered(error))
