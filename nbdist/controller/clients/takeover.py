"""What a client is given that takes over a session, and why it may not. Pure."""

from __future__ import annotations

from nbdist.controller.base.outputlog import LastOutput
from nbdist.controller.clients.client_side import ClientSide
from nbdist.controller.clients.unseen_cells import UnseenCells
from nbdist.controller.ranks.members import Members
from nbdist.wire.messages.handover import Attach, Attached, Choices, StartedWith
from nbdist.wire.messages.life import RankSettings, Start
from nbdist.wire.messages.output import Output


def hindrance(side: ClientSide, members: Members | None, message: Attach, *, ending: bool) -> str:
    """Return why a client may not drive the session; "" if it may.

    Args:
        side: The client that drives, or has driven.
        members: The ranks.
        message: What the newcomer asks for.
        ending: Whether the session is about to end.
    """
    if members is None or ending or members.roster.ending:
        return "this session is ending, and has no ranks to attach to. `nbdist ls` shows the others"
    if side.unseen.launches:
        return "these ranks belong to a function that `notebook_launcher` has started: they end with it"
    if not members.roster.up:
        return "the ranks of this session are still starting. Try again when `nbdist ls` shows them"
    if not side.alone and not message.take:
        return f"this session belongs to {side.client}, which is still connected: `attach --take` takes it over"
    return ""


def started_with(start: Start, choices: Choices) -> StartedWith:
    """Return what a later start needs to know of this one, and what was chosen since."""
    settings = {name: getattr(start.options, name) for name in RankSettings.__struct_fields__}
    return StartedWith(start.linger, choices.nodes or start.nodes, choices, **settings)


def attached(
    unseen: UnseenCells,
    members: Members,
    started: StartedWith,
    first_serial: int,
    away: float,
    printed: dict[int, LastOutput],
) -> Attached:
    """Return what a client is told first.

    Args:
        unseen: What has run meanwhile.
        members: The ranks.
        started: As of `started_with`.
        first_serial: Where its count of cells begins.
        away: Seconds that the session was without a client.
        printed: By cell, the end of its output at the moment of the handover.
    """
    tails = {
        serial: (tail.printed, [Output(rank, stream, data) for rank, stream, data in tail.records])
        for serial, tail in printed.items()
    }
    notices, unseen.notices = unseen.notices, []
    return Attached(
        members.roster.infos(),
        members.roster.backend,
        first_serial,
        members.roster.slack.answers,
        members.cells.generation,
        [rank.dead for rank in members.roster.ranks.values() if rank.dead is not None],
        dict(unseen.names),
        started,
        unseen.report(tails),
        unseen.last,
        members.history.marked,
        notices,
        away,
    )
