"""What `%distributed logs`, `stacks`, `flight`, `variables`, `debug`, `follow` and `look` do: looking at ranks.

At what they printed, do, have done, and hold; at what ranks do that another client drives, or that others have started.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable

from nbdist.base.text import size
from nbdist.client.output.publisher import FOLD_LIMIT, Publisher
from nbdist.client.reports import stack_report
from nbdist.client.reports.logs import CellLog
from nbdist.client.requests.compared_variables import describe_variables
from nbdist.client.requests.status import look_at_stacks
from nbdist.client.session.current import get_session
from nbdist.client.session.following import Following
from nbdist.client.session.session import rank_set_of
from nbdist.errors import UsageError


def debug(arguments: argparse.Namespace) -> None:
    """Open the debugger on a rank, or the port of one."""
    session = get_session()
    ranks = rank_set_of(session).among(arguments.ranks)
    if arguments.debugpy:
        print(session.debugpy(ranks))
    elif ranks is not None and len(ranks) != 1:
        raise UsageError("the debugger opens on one rank: `%distributed debug -r 0`")
    else:
        session.debug(None if ranks is None else ranks[0])


def logs(arguments: argparse.Namespace) -> None:
    """Show what a cell printed, or write it to a file."""
    session = get_session()
    ranks = rank_set_of(session).among(arguments.ranks)
    log = CellLog(rank_set_of(session).traffic.read_log, arguments.cell)
    pieces = log.lines([info.rank for info in session.ranks] if ranks is None else ranks, arguments.tail)
    if arguments.save is not None:
        print(f"{size(_save(pieces, arguments.save))} written to {arguments.save}")
    else:
        _show_log(pieces, log.size)
    if gaps := log.explain_gaps():
        print(f"nbdist: {gaps}", file=sys.stderr)


def stacks(arguments: argparse.Namespace) -> None:
    """Show where ranks are."""
    session = get_session()
    found = look_at_stacks(rank_set_of(session), arguments.ranks, native=arguments.native)
    print(stack_report.render(found, rank_set_of(session).traffic.places))


def flight(arguments: argparse.Namespace) -> None:
    """Show the last collectives of ranks side by side."""
    session = get_session()
    print(session.flight(rank_set_of(session).among(arguments.ranks), arguments.last))


def look(arguments: argparse.Namespace) -> None:
    """Show what a job that others have started does, or run code in it."""
    from nbdist.jobs.job_code import run_in_job
    from nbdist.jobs.job_report import named_job, report

    job = named_job(arguments.name)
    if arguments.run is None:
        print(report(job, stacks=arguments.stacks, collectives=arguments.flight, names=arguments.locals))
        return
    done = run_in_job(job, [arguments.run], arguments.ranks or "all", arguments.limit)
    print(f"{done.text}{done.pause}")
    if done.error is not None:
        raise done.error


def variables(arguments: argparse.Namespace) -> None:
    """Print a table of all variables, or what there is to know of one."""
    rank_set = rank_set_of(get_session())
    ranks = rank_set.choose(rank_set.living() if arguments.ranks is None else arguments.ranks)
    if arguments.diff is not None and arguments.name is None:
        raise UsageError("--diff takes a variable: `%distributed variables w --diff 0,3`")
    print(describe_variables(rank_set, ranks, arguments.name or "", arguments.diff))


class FollowVerb:
    """What this notebook follows: one session at a time, which another client drives."""

    def __init__(self) -> None:
        self._following: Following | None = None

    def follow(self, arguments: argparse.Namespace) -> None:
        """Show what a session does, below this cell, instead of what was followed before."""
        if arguments.stop:
            self.stop()
            return
        following = Following(arguments.name)
        self.stop()
        self._following = following
        if arguments.wait:
            following.wait()

    def stop(self) -> None:
        """Follow no longer."""
        if self._following is not None:
            self._following.stop()
        self._following = None

    @property
    def refusal(self) -> str:
        """Why a cell finds no ranks where a session is followed; "" where none is."""
        return self._following.refusal if self._following is not None else ""


def _save(pieces: Iterable[str], path: str) -> int:
    """Write text to a file as it arrives, and return the number of bytes written."""
    written = 0
    try:
        with open(path, "wb") as file:
            for piece in pieces:
                written += file.write(piece.encode(errors="replace"))
    except OSError as error:
        raise UsageError(f"can't write {path}: {error.strerror}; use another file for --save") from None
    return written


def _show_log(pieces: Iterable[str], whole: int) -> None:
    shown: list[str] = []
    length = 0
    for piece in pieces:
        shown.append(piece)
        length += len(piece)
        if length > FOLD_LIMIT:
            raise UsageError(
                f"the log of this cell has {size(whole)}, too much to show here: use "
                "`%distributed logs --save FILE`, or `--tail 100`"
            )
    publisher = Publisher(0)
    publisher.text("stdout", "".join(shown))
    publisher.complete()
