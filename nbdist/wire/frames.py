"""The wire: every message between client, controller, agent and ranks, encoded as a frame and decoded.

Independent of what the messages cause, and of the connections that carry them (`nbdist.wire.lanes`).
"""

from __future__ import annotations

import msgspec

from nbdist.wire.alike import Alike
from nbdist.wire.base.message import Hello
from nbdist.wire.base.system_text import as_bytes, escaped, mapped
from nbdist.wire.messages.announcements import EndAnnounced
from nbdist.wire.messages.cells import (
    Execute,
    InOrder,
    Interrupt,
    Interrupted,
    Recover,
    Recovered,
    Remark,
    Reply,
    Returned,
)
from nbdist.wire.messages.chunks import Arrived, Chunk, Discard, Expect, Fetch, Spoiled, Taken
from nbdist.wire.messages.errands import Errand, ErrandDone
from nbdist.wire.messages.handover import Attach, Attached, AttachRefused, Choices, Displaced, Ending, Goodbye, Leave
from nbdist.wire.messages.healing import (
    Adopt,
    EndRanks,
    GiveUpHeal,
    Grow,
    Heal,
    Healed,
    HealFailed,
    JoinGroups,
    Renumbered,
    Replaced,
    Resize,
    Respawn,
    Shrink,
)
from nbdist.wire.messages.life import (
    Broken,
    Died,
    Progress,
    Shutdown,
    Start,
    Started,
    StartFailed,
    StartOptions,
    Stop,
    Stopped,
)
from nbdist.wire.messages.output import Credit, Display, LogPart, Notice, Output, Prompt, ReadLog, WidgetMessage
from nbdist.wire.messages.rank_processes import (
    Exited,
    Gone,
    Kill,
    Quit,
    Ready,
    Spawn,
    Spawned,
    SpawnFailed,
    Spawning,
    StoreOpened,
)
from nbdist.wire.messages.visitor_messages import Describe, Description, Follow, Followed, InterruptAll
from nbdist.wire.processes.nodes import Invited, Join, NodeLeft, Ping, Pong, Refused, Welcome
from nbdist.wire.questions.questions import Answer, Ask, CellsRun, GetCellsRun, GetStatus, Look, Status, WatchNodes

AnyMessage = (
    Hello
    | Start
    | Execute
    | Interrupt
    | Ask
    | GetStatus
    | Status
    | GetCellsRun
    | CellsRun
    | ReadLog
    | Credit
    | WidgetMessage
    | Interrupted
    | Returned
    | Stop
    | WatchNodes
    | Look
    | Shutdown
    | Progress
    | Started
    | StartFailed
    | Stopped
    | Output
    | Alike
    | Display
    | Prompt
    | Reply
    | Died
    | Notice
    | Remark
    | Recovered
    | Broken
    | Answer
    | LogPart
    | Spawn
    | Kill
    | Spawned
    | Spawning
    | SpawnFailed
    | Exited
    | Gone
    | Ready
    | Recover
    | InOrder
    | Quit
    | StoreOpened
    | Invited
    | Join
    | Welcome
    | Refused
    | Ping
    | Pong
    | NodeLeft
    | Describe
    | InterruptAll
    | Description
    | Follow
    | Followed
    | Expect
    | Chunk
    | Taken
    | Arrived
    | Fetch
    | Spoiled
    | Discard
    | Heal
    | GiveUpHeal
    | Adopt
    | Replaced
    | JoinGroups
    | Shrink
    | Grow
    | Resize
    | Renumbered
    | Healed
    | HealFailed
    | Respawn
    | EndRanks
    | Attach
    | AttachRefused
    | Attached
    | Displaced
    | Leave
    | Ending
    | Goodbye
    | Choices
    | EndAnnounced
    | Errand
    | ErrandDone
)

_encode = msgspec.msgpack.Encoder(enc_hook=repr).encode


def encode(message: object) -> bytes:
    """Encode a message, or a part of one, as a frame. Lone surrogates, which a frame can't hold as text, are escaped.

    Names given by the system (StartOptions) keep them.
    """
    try:
        return _encode(message)
    except UnicodeEncodeError:
        plain = msgspec.to_builtins(message, builtin_types=(bytes,), enc_hook=repr)
        exact = isinstance(getattr(message, "options", None), StartOptions)
        return _encode(mapped(plain, as_bytes if exact else escaped))


_decoder = msgspec.msgpack.Decoder(AnyMessage)


class _DisplayHead(msgspec.Struct, array_like=True, tag="Display"):
    rank: int
    sequence: int


_head_decoder = msgspec.msgpack.Decoder(_DisplayHead)


def sequence_of(frame: bytes) -> int | None:
    """Return the sequence number of a Display that can't be decoded as a whole; None if it isn't a Display."""
    try:
        return _head_decoder.decode(frame).sequence
    except (msgspec.DecodeError, UnicodeDecodeError):  # the latter where a text is none
        return None


def decode(frame: bytes) -> AnyMessage:
    """Decode the message in a frame.

    Raises:
        msgspec.DecodeError: The frame isn't one of ours.
    """
    message: AnyMessage = _decoder.decode(frame)
    return message
