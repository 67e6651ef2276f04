"""Those who have the session's key file and do not drive it: they may ask, follow, interrupt and end it.

They may also ask something of the client that drives it: an errand.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from nbdist.base.processes import describe_exit
from nbdist.controller.base.logwriter import LogWriter
from nbdist.controller.base.message_router import MessageRouter
from nbdist.controller.base.outputlog import LastOutput, NewOutput
from nbdist.controller.clients.client_side import ClientSide
from nbdist.controller.ranks.members import Members
from nbdist.wire.base.message import Message
from nbdist.wire.messages.cells import Interrupt
from nbdist.wire.messages.errands import Errand, ErrandDone
from nbdist.wire.messages.life import Broken, Died, Shutdown
from nbdist.wire.messages.visitor_messages import (
    Describe,
    Description,
    Follow,
    Followed,
    InterruptAll,
    Overtaken,
    Printed,
    RunningCell,
)
from nbdist.wire.questions.knowing import GetMemory, ProcessMemory
from nbdist.wire.questions.question import NoAnswer
from nbdist.wire.questions.questions import CellsRun, RankStatus, Status

_LIMIT = 0.5  # seconds for ranks to answer; one in C code that holds Python's lock does not


@dataclass(frozen=True)
class Standing:
    """What is to be said of ranks to somebody from outside; the fields are those of a Description."""

    ranks: int = 0
    gpus: int = 0
    running: list[RunningCell] = field(default_factory=list)
    since: float = 0.0


@dataclass
class _Requested:
    visitor: bytes
    standing: Standing
    nodes: list[str]
    left: int
    due: float
    held: list[ProcessMemory] = field(default_factory=list)


class Descriptions:
    """Descriptions that are being made.

    Args:
        router: To send them by.
    """

    def __init__(self, router: MessageRouter) -> None:
        self._router = router
        self._open: list[tuple[_Requested, ClientSide]] = []

    def make(self, visitor: bytes, side: ClientSide, members: Members | None, nodes: list[str]) -> None:
        """Describe the session to a visitor, as soon as its ranks have answered.

        Args:
            visitor: Its lane.
            side: The client's side.
            members: The ranks.
            nodes: The names of the machines.
        """
        standing = _standing_of(members) if members is not None else Standing()
        request = _Requested(visitor, standing, nodes, standing.ranks, time.monotonic() + _LIMIT)
        self._open.append((request, side))

        def answered(rank: int, answer: ProcessMemory | NoAnswer, now: float) -> None:
            request.left -= 1
            if isinstance(answer, ProcessMemory):
                request.held.append(answer)
            self.tick(now)

        if members is not None and members.roster.up:
            living = [rank for rank in members.roster.everyone() if members.roster.lives(rank)]
            members.cells.ask(living, GetMemory(), answered)
        else:
            request.left = 0
        self.tick(time.monotonic())

    def due(self) -> float | None:
        """Return when `tick` should be called."""
        return min((request.due for request, _ in self._open), default=None)

    def tick(self, now: float) -> None:
        """Send what is ready, or has waited long enough."""
        ready = [each for each in self._open if each[0].left <= 0 or now >= each[0].due]
        self._open = [each for each in self._open if each not in ready]
        for request, side in ready:
            self._router.send(request.visitor, _describe(request, side, now))
            self._router.drop([request.visitor])


def _standing_of(members: Members) -> Standing:
    ranks = members.roster.ranks.values()
    gpus = {(members.roster.where.node_of(rank.rank), rank.device) for rank in ranks if rank.device != "cpu"}
    running = members.cells.running(time.monotonic())
    return Standing(
        len(members.roster.ranks) - len(members.roster.dead()), len(gpus - {(0, "")}), running, members.roster.up_at
    )


def status_of(members: Members | None, request: int) -> Status:
    """Return what is known of each rank, as the answer to a request."""
    if members is None:
        return Status(request, [])
    ranks = [
        RankStatus(r.rank, r.pid, r.device, r.serial, _how_it_ended(r.dead)) for r in members.roster.ranks.values()
    ]
    return Status(request, ranks, members.history.marked)


def cells_run(members: Members | None, request: int) -> CellsRun:
    """Return what has run on the ranks, as the answer to a request."""
    return CellsRun(request, [] if members is None else members.history.cells)


def _how_it_ended(died: Died | None) -> str:
    """Return the cause, if it ended with another process: its own end says nothing then."""
    return "" if died is None else died.cause or describe_exit(died.code)


def _describe(request: _Requested, side: ClientSide, now: float) -> Description:
    told = request.standing
    held = [each.on_gpu if told.gpus else each.private for each in request.held]
    return Description(
        os.getpid(),
        side.client.pid,
        side.left,
        max(0.0, side.leave_at - now) if side.leave_at is not None else 0.0,
        side.client.notebook,
        side.client.seat,
        told.ranks,
        request.nodes,
        told.gpus,
        sum(each or 0 for each in held),
        told.running,
        told.since,
    )


class Followers:
    """Answers those who follow.

    Args:
        router: To send by.
        log: The output log.
    """

    def __init__(self, router: MessageRouter, log: LogWriter) -> None:
        self._router = router
        self._log = log

    def answer(self, visitor: bytes, question: Follow, side: ClientSide, ranks: Sequence[int]) -> None:
        """Answer as soon as the log has what was printed until now.

        Args:
            visitor: Who asks.
            question: What it has seen already.
            side: The client's side.
            ranks: Those that live.
        """
        self._router.connect(visitor)
        running, count = side.unseen.running(), side.ended.count
        ended, missed = side.ended.since(question.ended) if question.position >= 0 else ([], 0)

        def send(printed: list[Printed], new: NewOutput) -> None:
            # An end is reported behind all that was printed before it.
            ends = (ended, count, missed) if new.whole else ([], question.ended, 0)
            self._router.send(
                visitor,
                Followed(
                    side.client.pid,
                    side.client.notebook,
                    side.left,
                    list(ranks),
                    running,
                    printed,
                    ends[0],
                    new.position,
                    ends[1],
                    Overtaken(ends[2], new.dropped),
                ),
            )
            self._router.drop([visitor])  # until it asks again

        def send_tails(tails: dict[int, LastOutput], new: NewOutput) -> None:
            send([Printed(serial, *record) for serial, last in tails.items() for record in last.records], new)

        if question.position >= 0:
            self._log.follow(lambda new: send([Printed(*record) for record in new.records], new), question.position)
            return
        tails: list[dict[int, LastOutput]] = []
        self._log.tails(tails.append, [cell.serial for cell in running])
        self._log.follow(lambda new: send_tails(tails[0], new), -1)


class Errands:
    """Passes what visitors want from the client on to it, and its answers back.

    Args:
        router: To send by.
        side: The client's side.
    """

    def __init__(self, router: MessageRouter, side: ClientSide) -> None:
        self._router = router
        self._side = side
        self._open: set[tuple[bytes, int]] = set()

    def bring(self, visitor: bytes, errand: Errand) -> None:
        """Pass on an errand; without a client, say so."""
        self._router.connect(visitor)
        if self._side.alone:
            self._return(ErrandDone(errand.number, visitor, _ALONE, alone=True))
            return
        self._open.add((visitor, errand.number))
        self._side.send(msgspec.structs.replace(errand, visitor=visitor))

    def done(self, answer: ErrandDone) -> None:
        """Pass on an answer."""
        if (answer.visitor, answer.number) in self._open:
            self._open.discard((answer.visitor, answer.number))
            self._return(answer)

    def give_up(self) -> None:
        """Answer all that wait: the client is gone, or another."""
        for visitor, number in list(self._open):
            self.done(ErrandDone(number, visitor, _LEFT))

    def _return(self, answer: ErrandDone) -> None:
        self._router.send(answer.visitor, answer)
        if not any(visitor == answer.visitor for visitor, _ in self._open):
            self._router.drop([answer.visitor])  # until it asks again


_ALONE = "no notebook or other client is attached to this session"
_LEFT = "the client that drives this session has left it, or lost it to another, before it answered"
_STOPPED = "the session was ended by `nbdist stop`; all ranks ended with it. `%distributed start` starts one"


class Visitors:
    """The visitors of a session.

    Args:
        router: To send by.
        side: The client's side.
        log: The output log.

    Attributes:
        descriptions: Descriptions that are being made.
        errands: What they want from the client.
    """

    def __init__(self, router: MessageRouter, side: ClientSide, log: LogWriter) -> None:
        self._router = router
        self._side = side
        self.errands = Errands(router, side)
        self._followers = Followers(router, log)
        self.descriptions = Descriptions(router)

    def receive(self, visitor: bytes, message: Message, members: Members | None, hosts: Sequence[str]) -> bool:
        """Answer a visitor.

        Args:
            visitor: Its lane.
            message: What it asks.
            members: The ranks.
            hosts: The names of the machines.

        Returns:
            Whether it wants the session to end.
        """
        if isinstance(message, InterruptAll) and members is not None:
            for serial, ranks in members.cells.left().items():
                members.stop(Interrupt(serial, ranks))
        if isinstance(message, Describe | InterruptAll):
            self.descriptions.make(visitor, self._side, members, list(hosts))
            return False
        if isinstance(message, Errand):
            self.errands.bring(visitor, message)
            return False
        if isinstance(message, Follow):
            living = (
                [rank for rank in members.roster.everyone() if members.roster.lives(rank)]
                if members is not None
                else []
            )
            self._followers.answer(visitor, message, self._side, living)
            return False
        self._router.disconnect(visitor)
        if not isinstance(message, Shutdown):
            return False
        self._side.send(Broken(_STOPPED, wanted=True))
        return True
