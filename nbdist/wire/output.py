"""What ranks print and show, how much of it may be on its way, and what the log has kept."""

from __future__ import annotations

from typing import Any, Literal

from nbdist.wire.message import Message, Size

STDOUT, STDERR = 1, 2

# Sequence numbers of marks in a rank's stdout: above END the place of an item, END the end of a cell whose reply comes
# by itself, PLAIN_END the end of one that has nothing to say but that all went well.
END, PLAIN_END = 0, -1

# What a rank may have printed (or shown) that its notebook has not taken yet; then its pipe fills and the rank waits.
OUTPUT_WINDOW = 1 << 20
OUTPUT_CREDIT = 1 << 17


ItemKind = Literal["display", "update", "result", "clear"]


class Output(Message, frozen=True):
    """Bytes that a rank printed. On the way from the agent they may carry the mark that follows them."""

    rank: int
    stream: int
    data: bytes
    mark: tuple[int, int] | None = None


class Display(Message, frozen=True):
    """A rich item of a rank. `sequence`: its place in the rank's stdout.

    size: bytes to be credited to the rank when the client has taken it.
    """

    rank: int
    sequence: int
    kind: ItemKind
    data: dict[str, Any]
    metadata: dict[str, Any]
    display_id: str = ""
    wait: bool = False
    size: int = 0


class WidgetMessage(Message, frozen=True):
    """A comm message between the page and a widget that lives on a rank, in either direction.

    size: bytes to be credited to the rank when the client has taken it.
    """

    rank: int
    event: str
    comm_id: str
    target: str
    data: dict[str, Any]
    metadata: dict[str, Any]
    buffers: list[bytes]
    size: int = 0


class Credit(Message, frozen=True):
    """The client has taken `size` bytes of what a rank has printed; `items`: of its displays and widget messages."""

    rank: int
    size: Size
    items: bool = False


class Notice(Message, frozen=True):
    """One line for the user."""

    text: str


class ReadLog(Message, frozen=True):
    """A question to the controller: some of what was printed. Its answer is a LogPart.

    serials: which cells; none: those with the number `cell` in the notebook; None: the newest that printed.
    ranks: whose output; None: all. position: `next` of the part before.
    """

    request: int
    serials: list[int] = []
    cell: int | None = None
    ranks: list[int] | None = None
    position: int = 0


class LogPart(Message, frozen=True):
    """Some of what was printed; without `serials`: the log has nothing of such a cell.

    serials, number: the cells that it is of. records: rank, stream and bytes. next: where to read on, None at the end.
    size: bytes that the log has of these cells. dropped: bytes at their beginning that have made room for others.
    missing: bytes that the log could not take.
    """

    request: int
    serials: list[int] = []
    number: int = 0
    records: list[tuple[int, int, bytes]] = []
    next: int | None = None
    size: int = 0
    dropped: int = 0
    missing: int = 0
