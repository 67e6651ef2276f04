"""What somebody with the key file asks of a session that is not theirs to drive: `nbdist ls`, `stop`, `follow`."""

from __future__ import annotations

import msgspec

from nbdist.wire.base.message import Message, Seconds
from nbdist.wire.messages.cells import Kind, Reply
from nbdist.wire.messages.handover import Leaving
from nbdist.wire.messages.life import Died


class Describe(Message, frozen=True):
    """What is this session? Its answer is a Description."""


class InterruptAll(Message, frozen=True):
    """Stop what the ranks run, as `%distributed interrupt` does. Its answer is a Description."""


class RunningCell(msgspec.Struct, frozen=True):
    """number: in the notebook, 0 if it is not a cell. ranks: how many run it. seconds: for how long it has run."""

    number: int
    ranks: int
    seconds: float


class Description(Message, frozen=True):
    """A session.

    controller: its process id. kernel: that of its client, or of the last one. left: how that has left; None if it is
    there. seconds_left: until a session without a client ends. notebook, seat: the client's, as in ControllerSetup.
    ranks: how many live; 0 if it has none. nodes: the names of its machines. gpus: how many the ranks use. memory:
    bytes that the ranks hold, of GPUs if they use any. running: what they do. since: when they were ready, in seconds
    since 1970.
    """

    controller: int
    kernel: int
    left: Leaving | None
    seconds_left: Seconds
    notebook: str
    seat: str
    ranks: int
    nodes: list[str]
    gpus: int
    memory: int
    running: list[RunningCell]
    since: float


class Follow(Message, frozen=True):
    """What is new? Its answer is Followed, and the next question names what that has had.

    position: in the output log; -1: nothing yet, so that of what runs the newest output is wanted. ended: how many
    cells have been seen to end.
    """

    position: int = -1
    ended: int = 0


class FollowedCell(msgspec.Struct, frozen=True):
    """A cell, a function, or another thing that ranks run. All but `ends` as in UnseenCell.

    ends: what its ranks have reported when all have ended.
    """

    serial: int
    kind: Kind
    code: str
    number: int
    ranks: list[int]
    seconds: Seconds
    ends: list[Reply | Died] = []


class Printed(msgspec.Struct, frozen=True, array_like=True):
    """What a rank printed, in the order of the log."""

    serial: int
    rank: int
    stream: int
    data: bytes


class Overtaken(msgspec.Struct, frozen=True):
    """What a follower has missed: cells that have ended, and bytes of output that made room for newer ones."""

    ends: int = 0
    output: int = 0


class Followed(Message, frozen=True):
    """What a session did since the last question.

    kernel, notebook, left: as in Description. ranks: those that live. running: what they run. printed: new output.
    ended: what has ended. position, seen: for the next question. missed: what could not be given any more.
    """

    kernel: int
    notebook: str
    left: Leaving | None
    ranks: list[int]
    running: list[FollowedCell]
    printed: list[Printed]
    ended: list[FollowedCell]
    position: int
    seen: int
    missed: Overtaken
