"""What somebody with the key file asks of a session that is not theirs to drive: `nbdist ls`, `nbdist stop`."""

from __future__ import annotations

import msgspec

from nbdist.wire.message import Message


class Describe(Message, frozen=True):
    """What is this session? Its answer is a Description."""


class RunningCell(msgspec.Struct, frozen=True):
    """number: in the notebook, 0 if it is no cell. ranks: how many run it. seconds: for how long it has run."""

    number: int
    ranks: int
    seconds: float


class Description(Message, frozen=True):
    """A session.

    kernel: the notebook's process id. alone: whether that has ended. notebook: its file, "" if unknown. ranks: how many
    live; 0 if it has none. nodes: the names of its machines. gpus: how many the ranks use. running: what they do.
    since: when they were ready, in seconds since 1970.
    """

    kernel: int
    alone: bool
    notebook: str
    ranks: int
    nodes: list[str]
    gpus: int
    running: list[RunningCell]
    since: float
