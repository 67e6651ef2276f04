"""Between the controller and the process that starts nodes on other machines: lines of JSON on its stdin and stdout."""

from __future__ import annotations

import msgspec

from nbdist.base import limits
from nbdist.wire.base.message import Seconds


class Seat(msgspec.Struct, frozen=True):
    """A node that is to come. number: which of the session's nodes, from 1. token: what it joins with."""

    number: int
    token: str


class Invitation(msgspec.Struct, frozen=True):
    """Where nodes are to join, and who. address: host:port. seats: in the order of the hosts.

    timeout: seconds without a sign of life until a node is given up.
    """

    address: str
    seats: list[Seat]
    timeout: Seconds = limits.NODE_TIMEOUT


class StarterSetup(msgspec.Struct, frozen=True):
    """The first line. engine: its name. options: the engine's own, as JSON.

    When standard input ends, so does all that was started.
    """

    engine: str
    options: str
    invitation: Invitation


class StarterProgress(msgspec.Struct, tag=True, frozen=True):
    """What the engine is doing; "": nothing to report.

    patience: seconds that a node may take to come from now on; None: as before.
    """

    text: str
    patience: Seconds | None = None


class StarterFailed(msgspec.Struct, tag=True, frozen=True):
    """No node will come, and why."""

    text: str


class NodeEnded(msgspec.Struct, tag=True, frozen=True):
    """What was started for a seat has ended. text: why, and what to do."""

    seat: int
    text: str


Report = StarterProgress | StarterFailed | NodeEnded


def encode_report(report: Report) -> bytes:
    """Encode a report as a line."""
    return msgspec.json.encode(report) + b"\n"


_decoder = msgspec.json.Decoder(Report)


def decode_report(line: bytes) -> Report:
    """Decode a line.

    Raises:
        msgspec.DecodeError: It is not a report.
    """
    report: Report = _decoder.decode(line)
    return report
