"""What a session shows of itself to somebody from outside, with what its ranks hold in memory, which they are asked."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, field

from nbdist.base.processes import describe_exit
from nbdist.controller.base.message_router import MessageRouter
from nbdist.controller.clients.client_side import ClientSide
from nbdist.controller.ranks.members import Members
from nbdist.wire.messages.life import Died
from nbdist.wire.messages.visitor_messages import Description, RunningCell
from nbdist.wire.questions.knowing import GetMemory, ProcessMemory
from nbdist.wire.questions.question import NoAnswer
from nbdist.wire.questions.questions import RankStatus, Status

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

        if members is not None and members.up:
            living = [rank for rank in members.everyone() if members.lives(rank)]
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
    ranks = members.ranks.values()
    gpus = {(members.where.node_of(rank.rank), rank.device) for rank in ranks if rank.device != "cpu"}
    running = members.cells.running(time.monotonic())
    return Standing(len(members.ranks) - len(members.dead()), len(gpus - {(0, "")}), running, members.up_at)


def status_of(members: Members | None, request: int) -> Status:
    """Return what is known of each rank, as the answer to a request."""
    if members is None:
        return Status(request, [])
    ranks = [RankStatus(r.rank, r.pid, r.device, r.serial, _how_it_ended(r.dead)) for r in members.ranks.values()]
    return Status(request, ranks, members.newcomers.history.marked)


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
