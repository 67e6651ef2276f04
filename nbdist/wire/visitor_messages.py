"""What somebody with the key file asks of a session that is not theirs to drive: `nbdist ls`, `nbdist stop`."""

from __future__ import annotations

import msgspec

from nbdist.wire.handover import Leaving
from nbdist.wire.message import Message, Seconds


class Describe(Message, frozen=True):
    """What is this session? Its answer is a Description."""


class RunningCell(msgspec.Struct, frozen=True):
    """number: in the notebook, 0 if it is no cell. ranks: how many run it. seconds: for how long it has run."""

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
