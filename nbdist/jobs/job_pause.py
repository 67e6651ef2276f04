"""Has all ranks of a job stand still after the same optimizer step, and runs code there.

Each rank goes on by itself when its connection ends or its time is over, so whatever happens here, none stays behind.
"""

from __future__ import annotations

import math
import os
import selectors
import socket
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass

import msgspec

from nbdist.base.ranks import describe_ranks
from nbdist.base.text import counted, span
from nbdist.errors import UsageError
from nbdist.jobs.found_jobs import ANSWER_LIMIT, FoundJob, JobProcess
from nbdist.serving.collective_counts import Entered, is_ahead, more_entered
from nbdist.serving.control_messages import (
    BreakOff,
    CodeRan,
    Controlled,
    ControlRefused,
    GoOn,
    Order,
    PauseAfter,
    Report,
    RunCode,
    StandsStill,
    StepPassed,
    TakeControl,
    WentOn,
)
from nbdist.serving.look_messages import RankLook, receive, send, short_path

LIMIT = 60.0  # seconds for which ranks stand still at most
_AHEAD = 0.05  # seconds from now to the step after which ranks are to stand still
_LATER = 2.0  # seconds that answers may take
_BEFORE_END = 2.0  # seconds before the ranks' time is over, in which those that can't go on are told so
_NO_COLLECTIVES = {"", "backward", "send", "recv", "isend", "irecv"}
_ALLOW = "start it with `nbdist serve --control SCRIPT`, or call `nbdist.serve(control=True)` in it"


@dataclass(frozen=True)
class Unended:
    """Code whose end on a rank is not known.

    Attributes:
        why: What the rank did instead, as "went on, as it was interrupted".
        died: Whether its process has ended.
    """

    why: str
    died: bool = False


class JobPause:
    """A job whose ranks stand still.

    Attributes:
        step: After which.
        seconds: For how long they did, of the one that did so for longest; known once they have gone on.
    """

    def __init__(self, job: FoundJob, limit: float, ranks: Mapping[int, _HeldRank], selector: selectors.BaseSelector):
        self.step = 0
        self.seconds = 0.0
        self._job = job
        self._limit = limit
        self._ranks = ranks
        self._selector = selector
        self._ends_at = math.inf

    def run(self, code: str, ranks: Collection[int]) -> dict[int, CodeRan | Unended]:
        """Run code on ranks at the same time.

        Args:
            code: Python.
            ranks: Which.

        Returns:
            What came of it, or why that is not known, by rank. Where it has left some ranks in a collective that others
            have not called, the job ends with an error: going on would give wrong sums.
        """
        for rank in ranks:
            self._ranks[rank].send(RunCode(code))
        found: dict[int, CodeRan | Unended] = {}
        self._await_code(found, ranks, self._ends_at - min(_BEFORE_END, self._limit / 4))
        left = set(ranks) - set(found)
        if left and (stuck := self._out_of_step(left)):
            why = _describe_stuck(stuck)
            for each in self._ranks.values():
                each.send(BreakOff(why))
            found |= dict.fromkeys(stuck, Unended(f"did not end the code: {why}"))
        self._await_code(found, ranks, self._ends_at + _LATER)
        return {rank: found.get(rank) or self._late_code(rank) for rank in sorted(ranks)}

    def stand_still(self) -> None:
        """Have all ranks stand still after the same step.

        Raises:
            UsageError: One does not get there. All go on.
        """
        steps = max(each.steps for each in self._ranks.values())
        pace = max(each.step_seconds for each in self._ranks.values())
        ahead = max(1, math.ceil(_AHEAD / pace)) if pace else 1
        while passed := self._aim(steps + ahead, time.monotonic() + self._limit + 2 * ahead * pace + _LATER):
            steps, ahead = passed, 2 * ahead

    def go_on(self) -> None:
        """Have all ranks go on."""
        for each in self._ranks.values():
            each.send(GoOn())
        waiting = set(self._ranks)
        for rank, report in self._reports(time.monotonic() + _LATER):
            if isinstance(report, WentOn | None):
                waiting.discard(rank)
            if not waiting:
                return

    def _aim(self, step: int, end: float) -> int:
        """Return 0 once all stand still after this step, or the steps of one that had made it already."""
        self.step = step
        waiting = set(self._ranks)
        for each in self._ranks.values():
            each.send(PauseAfter(step))
        for rank, report in self._reports(end):
            if isinstance(report, StepPassed) and report.step == step:
                return report.steps
            if report is None:
                raise UsageError(f"rank {rank} of job {self._job.name} has ended; nothing was run")
            if isinstance(report, WentOn):
                break
            if isinstance(report, StandsStill) and report.step == step:
                self._ranks[rank].entered = report.entered
                waiting.discard(rank)
                self._ends_at = min(self._ends_at, time.monotonic() + self._limit)
            if not waiting:
                return 0
        raise UsageError(self._late(waiting))

    def _late(self, ranks: Collection[int]) -> str:
        """Return which ranks have not come to the step, and what they do instead."""
        looks = self._job.look()
        doing = [f"rank {rank} is in {_doing(looks[rank])}" for rank in sorted(ranks)]
        arrived = sorted(set(self._ranks) - set(ranks))
        others = f", where {describe_ranks(arrived)} waited" if arrived else ""
        limit = f"; `--for` sets another limit than {span(self._limit)}"
        late = (
            f"job {self._job.name} was not paused: {describe_ranks(ranks)} did not come to step {self.step:,}{others}"
        )
        return f"{late}. {'; '.join(doing)}. All ranks go on, and nothing was run{limit}"

    def _await_code(self, found: dict[int, CodeRan | Unended], ranks: Collection[int], end: float) -> None:
        """Wait until all of these ranks have ended the code, and note what came of it."""
        if len(found) == len(ranks):
            return
        for rank, report in self._reports(end):
            if isinstance(report, CodeRan):
                found.setdefault(rank, report)
            elif rank in ranks:
                found.setdefault(rank, _gone(report))
            if len(found) == len(ranks):
                return

    def _out_of_step(self, left: Collection[int]) -> dict[int, str]:
        """Return the ranks among these that wait in a collective, and in which, that one which is done has not called.

        By counts, since the others of a slow collective may have done their part.
        """
        looks = {rank: look for rank, look in self._job.look().items() if isinstance(look, RankLook)}
        more = {rank: more_entered(look.entered, self._ranks[rank].entered) for rank, look in looks.items()}
        done = [more[rank] for rank in looks if rank not in left]
        return {
            rank: looks[rank].collective
            for rank in left
            if rank in looks
            and looks[rank].collective not in _NO_COLLECTIVES
            and any(is_ahead(more[rank], other) for other in done)
        }

    def _late_code(self, rank: int) -> Unended:
        doing = _doing(self._job.look()[rank])
        return Unended(f"still runs the code, in {doing}, and goes on when that returns")

    def _reports(self, end: float) -> Iterator[tuple[int, Report | None]]:
        """Yield what ranks say until then, in any order; None: a rank's process has ended."""
        while (left := end - time.monotonic()) > 0 and self._selector.get_map():
            for key, _ in self._selector.select(left):
                rank: _HeldRank = key.data
                report = rank.receive()
                if isinstance(report, WentOn):
                    self.seconds = max(self.seconds, report.seconds)
                if report is None:
                    self._selector.unregister(rank.connection)
                yield rank.process.rank, report


@contextmanager
def paused(job: FoundJob, limit: float = LIMIT) -> Iterator[JobPause]:
    """Have all ranks of a job stand still after the same step; they go on at the end of the block.

    Args:
        job: The job. All of its ranks must be here, and allow it.
        limit: Seconds that each may stand still. It goes on then, whatever happens here.

    Raises:
        UsageError: It can't be paused; the text says why. All ranks go on.
    """
    _check_whole(job)
    with ExitStack() as connections:
        selector = connections.enter_context(selectors.DefaultSelector())
        ranks = {}
        for process in job.processes:  # in order: of two who want the job, one gets the first rank
            rank = ranks[process.rank] = _HeldRank(process)
            connections.callback(rank.connection.close)
            rank.take_control(limit)
            selector.register(rank.connection, selectors.EVENT_READ, rank)
        pause = JobPause(job, limit, ranks, selector)
        pause.stand_still()
        yield pause
        pause.go_on()


class _HeldRank:
    """A rank that takes orders.

    Attributes:
        process: The rank.
        connection: To it.
        entered: Collectives before it stood still, as `entered_collectives` counts them.
        steps: That it had made when it began to.
        step_seconds: Of one; 0: not known.
    """

    def __init__(self, process: JobProcess) -> None:
        self.process = process
        self.connection = socket.socket(socket.AF_UNIX)
        self.entered: Entered = {}
        self.steps = 0
        self.step_seconds = 0.0

    def take_control(self, limit: float) -> None:
        """Have it take orders.

        Raises:
            UsageError: It does not.
        """
        job, rank = self.process.job, self.process.rank
        assert self.process.address is not None
        try:
            with short_path(self.process.address) as path:
                self.connection.settimeout(ANSWER_LIMIT)
                self.connection.connect(path)
            send(self.connection, TakeControl(limit, os.getpid()))
            answer: Report = receive(self.connection, Report)
        except TimeoutError:
            raise UsageError(f"rank {rank} of job {job} is in a call that blocks Python; try again") from None
        except OSError:
            raise UsageError(f"rank {rank} of job {job} has ended") from None
        except msgspec.MsgspecError:
            raise UsageError(f"rank {rank} of job {job} runs another version of nbdist") from None
        if isinstance(answer, ControlRefused):
            raise UsageError(_refused(job, answer))
        if isinstance(answer, Controlled):
            self.steps, self.step_seconds = answer.steps, answer.step_seconds

    def send(self, order: Order) -> None:
        """Send an order. One to a rank that has ended is lost."""
        with suppress(OSError):
            send(self.connection, order)

    def receive(self) -> Report | None:
        """Return what it says; None: it has ended."""
        try:
            report: Report = receive(self.connection, Report)
        except (OSError, msgspec.MsgspecError):
            return None
        return report


def _check_whole(job: FoundJob) -> None:
    here = [each.rank for each in job.processes]
    mute = [each.rank for each in job.processes if each.address is None]
    if not job.serves:
        raise UsageError(f"job {job.name} takes no code: {_ALLOW}")
    if mute:
        raise UsageError(
            f"{describe_ranks(mute)} of job {job.name} can't be paused, so the others must not be either: on all "
            f"ranks, {_ALLOW}"
        )
    if len(here) != job.world_size:
        there = (
            f"{counted(job.world_size, 'rank')}, and {describe_ranks(here)} {'is' if len(here) == 1 else 'are'} here"
        )
        raise UsageError(
            f"job {job.name} has {there}. Ranks must be paused all together, or those on other machines would wait for "
            "them in a collective until it times out. A job whose ranks are on several machines can't be paused yet; "
            f"`nbdist look {job.name}` reads what those here do"
        )


def _refused(job: str, answer: ControlRefused) -> str:
    if answer.reason == "forbidden":
        return f"job {job} may be looked at only. To have it take code, {_ALLOW}"
    return f"job {job} is paused already, or about to be, by process {answer.by}: try again when that has ended"


def _gone(report: Report | None) -> Unended:
    """Return why a rank says no more of the code."""
    if report is None:
        return Unended("has ended", died=True)
    over = isinstance(report, WentOn) and report.limit
    return Unended("went on, as its time was over" if over else "went on, as it was interrupted")


def _describe_stuck(stuck: Mapping[int, str]) -> str:
    where = ", ".join(sorted(set(stuck.values())))
    return (
        f"code of a look has left {describe_ranks(stuck)} in {where}, which not all ranks have called. The training's "
        "next collective would have met it and given a wrong sum, so the job ends: start it again from its checkpoint"
    )


def _doing(look: RankLook | str) -> str:
    if isinstance(look, str):
        return look
    return f"{look.line} (in {look.collective})" if look.collective else look.line or "no line of the script"
