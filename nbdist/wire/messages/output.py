"""What ranks print and display, how much of it may be on its way, and what the log has kept."""

from __future__ import annotations

from typing import Literal

from nbdist.wire.base.message import Message, MimeBundle, Size

STDOUT, STDERR = 1, 2

# Sequence numbers of marks in a rank's stdout: above END the position of an item, END the end of a cell whose reply
# is sent separately, PLAIN_END the end of a cell that has nothing to report except success.
END, PLAIN_END = 0, -1

# Bytes a rank may print (or show) before its notebook takes them; then its pipe fills and the rank waits.
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
    """A rich item of a rank. sequence: its position in the rank's stdout.

    size: bytes to credit to the rank when the client has taken it.
    """

    rank: int
    sequence: int
    kind: ItemKind
    data: MimeBundle
    metadata: MimeBundle
    display_id: str = ""
    wait: bool = False
    size: int = 0


class WidgetMessage(Message, frozen=True):
    """A comm message between the page and a widget that lives on a rank, in either direction.

    size: bytes to credit to the rank when the client has taken it.
    """

    rank: int
    event: str
    comm_id: str
    target: str
    data: MimeBundle
    metadata: MimeBundle
    buffers: list[bytes]
    size: int = 0


class Prompt(Message, frozen=True):
    """Code on a rank waits for a line from the user. sequence: its position in the rank's stdout, like a Display's.

    password: whether what is typed is not shown.
    """

    rank: int
    sequence: int
    text: str
    password: bool = False


class Credit(Message, frozen=True):
    """The client has taken `size` bytes of a rank's output; items: of its displays and widget messages."""

    rank: int
    size: Size
    items: bool = False


class Notice(Message, frozen=True):
    """One line for the user."""

    text: str


class ReadLog(Message, frozen=True):
    """A request to the controller for part of the output. Its answer is a LogPart.

    serials: which cells; if empty, those with the number `cell` in the notebook, or for None the newest that printed.
    ranks: whose output; None for all. position: `next` of the previous part.
    """

    request: int
    serials: list[int] = []
    cell: int | None = None
    ranks: list[int] | None = None
    position: int = 0


class LogPart(Message, frozen=True):
    """Part of what was printed; without `serials` if the log has nothing from such a cell.

    serials, number: the cells it belongs to. records: rank, stream and bytes. next: where to continue, None at the end.
    size: bytes of these cells in the log. dropped: bytes dropped at their beginning to make room for others.
    missing: bytes that the log could not store. end: the position behind the records, where what comes later will be.
    """

    request: int
    serials: list[int] = []
    number: int = 0
    records: list[tuple[int, int, bytes]] = []
    next: int | None = None
    size: int = 0
    dropped: int = 0
    missing: int = 0
    end: int = 0
