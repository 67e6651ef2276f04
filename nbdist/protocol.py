"""The wire: every message between client, controller, agent and ranks, as a msgspec struct with a tag.

Knows nothing of what the messages cause, nor of the connections that carry them (`nbdist.lanes`).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec

from nbdist.metrics.memory import MemoryUsage
from nbdist.metrics.node.sample import NodeSample

VERSION = 1

STDOUT, STDERR = 1, 2

# Sequence numbers of marks in a rank's stdout: above END the place of an item, END the end of a cell whose reply comes
# by itself, PLAIN_END the end of one that has nothing to say but that all went well.
END, PLAIN_END = 0, -1

# Serial numbers that a client may give to its cells before it needs another block of them.
SERIALS = 1 << 32

# What a rank may have printed (or shown) that its notebook has not taken yet; then its pipe fills and the rank waits.
OUTPUT_WINDOW = 1 << 20
OUTPUT_CREDIT = 1 << 17

# What is out of these bounds is refused when it is decoded.
PATIENCE_VARIABLE = "NBDIST_START_PATIENCE"  # seconds that a start may go without progress
LONGEST = 1e9  # seconds that anything may be told to wait
Seconds = Annotated[float, msgspec.Meta(ge=0, le=LONGEST)]
Size = Annotated[int, msgspec.Meta(ge=0, le=1 << 40)]
Count = Annotated[int, msgspec.Meta(ge=1, le=1 << 16)]
Kind = Literal["cell", "call", "setup", "launch", "push", "pull", "free"]  # of an Execute


class Message(msgspec.Struct, array_like=True, tag=True, frozen=True):
    """Base of all messages."""


# --- any process to the controller -------------------------------------------------------------------------


class Hello(Message, frozen=True):
    """First message on each connection."""

    version: int
    pid: int


# --- client to controller ----------------------------------------------------------------------------------


class Place(msgspec.Struct, frozen=True):
    """Where ranks stand in a job of several nodes, or in one that may be started again.

    first_rank: this node's first rank. run: the job's name, for torch's elastic parts.
    master_addr, master_port: where all ranks meet; "": at our own store.
    """

    first_rank: int = 0
    world_size: int = 0
    node_rank: int = 0
    num_nodes: int = 1
    master_addr: str = ""
    master_port: int = 0
    run: str = ""
    restart: int = 0
    max_restarts: int = 0


# What the system has named need not be UTF-8: in Python's text the other bytes are lone surrogates, which no frame can
# hold. Such text is bytes between `encode` and `StartOptions.__post_init__`.
if TYPE_CHECKING:
    SystemText = str
else:
    SystemText = Any  # msgspec knows no union of text and bytes


class StartOptions(msgspec.Struct, frozen=True):
    """What `start` asks for. The environment is the notebook's, as it is at that moment.

    patience: seconds without progress after which the start is given up.
    exact: what an interrupted step has moved besides parameters is put back: buffers and random numbers.
    fresh: each rank is a Python of its own, not forked from the template.
    port: where the rendezvous store listens; 0: anywhere. place: of these ranks among those of other nodes.
    all_results: whether what a launched function returned comes back from all ranks, or from rank 0 only.
    fork_address: where the notebook listens that forks the ranks itself (a path of a Unix socket); "": it does not.
    """

    count: Count
    environment: dict[SystemText, SystemText]
    cwd: SystemText
    sys_path: list[SystemText]
    argv: list[SystemText]
    umask: int
    open_files: int  # how many the notebook may have open (RLIMIT_NOFILE)
    gpus: list[str] | None = None
    backend: str | None = None
    init: bool = True
    timeout: Seconds = 1800.0
    patience: Seconds = 120.0
    exact: bool = False
    fresh: bool = False
    port: int = 0
    place: Place | None = None
    all_results: bool = True
    fork_address: str = ""

    def __post_init__(self) -> None:
        for name in ("environment", "cwd", "sys_path", "argv"):
            msgspec.structs.force_setattr(self, name, _as_text(getattr(self, name)))

    @property
    def ranks(self) -> range:
        """Their numbers, which count through all nodes."""
        first = self.place.first_rank if self.place is not None else 0
        return range(first, first + self.count)

    def search_path(self) -> list[str]:
        """`sys_path` as it is meant in `cwd`."""
        return [os.path.join(self.cwd, entry) for entry in self.sys_path]


class Start(Message, frozen=True):
    """Bring up a set of ranks (and end the present one, if any). `linger`: seconds that it outlives a killed kernel."""

    options: StartOptions
    linger: Seconds = 0.0


class Execute(Message, frozen=True):
    """Run something on the main thread of ranks.

    kind: "cell" (code in the shell), "call" (a pickled function), "setup" (one of nbdist's own), "launch" (one that may
    return what can't travel), "push" (a pickled dict), "pull" (an expression in `code`), "free".
    number: the cell's number in the notebook. offset: lines of the cell above `code`.
    grace: seconds that ranks may wait in a collective for one that has raised.
    profile: a folder for the ranks' traces; "": nothing is profiled. The reply's payload is then the summary.
    memory: whether the reply tells what it cost in memory.
    """

    serial: int
    ranks: list[int]
    kind: Kind
    code: str
    number: int = 0
    offset: int = 0
    payload: bytes = b""
    grace: Seconds = 1.0
    profile: str = ""
    memory: bool = False


class Interrupt(Message, frozen=True):
    """Stop ranks that still run the cell `serial`. On its way to a rank: KeyboardInterrupt there.

    now: without waiting for the end of a step, or for a rank to leave a collective by itself.
    patience: seconds after which a rank that is still at it counts as stuck; None: as for cells.
    """

    serial: int
    ranks: list[int]
    now: bool = False
    patience: Seconds | None = None


class Ask(Message, frozen=True):
    """A question to the control threads of ranks ("complete", "inspect", "stack", "state", ...), answered at once.

    request: positive from the notebook, negative from the controller itself.
    """

    request: int
    ranks: list[int]
    question: str
    arguments: dict[str, Any] = {}


class AskController(Message, frozen=True):
    """A question to the controller and its agent: "status"."""

    request: int
    question: str
    arguments: dict[str, Any] = {}


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


class Credit(Message, frozen=True):
    """The client has taken `size` bytes of what a rank has printed; `items`: of its displays and widget messages."""

    rank: int
    size: Size
    items: bool = False


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


class Watch(Message, frozen=True):
    """Look at the nodes every `period` seconds from now on; 0: no longer."""

    period: Seconds


class Returned(Message, frozen=True):
    """Ranks on other nodes of the launch `serial` have returned: they take part in nothing any more."""

    serial: int
    ranks: list[int]


class Stop(Message, frozen=True):
    """End the ranks: after `grace` seconds by force. The controller, its agent and the template stay."""

    grace: Seconds = 1.0


class Shutdown(Message, frozen=True):
    """End everything."""


# --- agent to client ---------------------------------------------------------------------------------------


class Look(Message, frozen=True):
    """What a node's sampler has seen."""

    node: NodeSample


# --- controller to client ----------------------------------------------------------------------------------


class RankInfo(msgspec.Struct, frozen=True):
    """A rank as the notebook sees it."""

    rank: int
    pid: int
    device: str


class Progress(Message, frozen=True):
    """What a start-up is doing at the moment, in plain words."""

    text: str


class Started(Message, frozen=True):
    """The ranks are up and their process group is ready. `first_serial`: where the client's count of cells begins."""

    epoch: int
    ranks: list[RankInfo]
    backend: str
    notes: list[str]
    first_serial: int


class StartFailed(Message, frozen=True):
    """The ranks could not be brought up; nothing of them is left."""

    text: str


class Stopped(Message, frozen=True):
    """The ranks have ended."""


class Output(Message, frozen=True):
    """Bytes that a rank printed. On the way from the agent they may carry the mark that follows them."""

    rank: int
    stream: int
    data: bytes
    mark: tuple[int, int] | None = None


class Display(Message, frozen=True):
    """A rich item of a rank. kind: "display", "update", "result", "clear". `sequence`: its place in the rank's stdout.

    size: bytes to be credited to the rank when the client has taken it.
    """

    rank: int
    sequence: int
    kind: str
    data: dict[str, Any]
    metadata: dict[str, Any]
    display_id: str = ""
    wait: bool = False
    size: int = 0


class Failure(msgspec.Struct, frozen=True):
    """An exception on a rank, as text and, if possible, pickled. `when` is on the machine's monotonic clock.

    kind: "raised", "lost" (torch lost contact with another rank), "interrupted", "stopped" (between two steps).
    """

    name: str
    text: str
    traceback: str
    when: float
    pickled: bytes | None = None
    kind: str = "raised"


class Reply(Message, frozen=True):
    """A rank has finished an Execute. status: "ok", "error" or "interrupted".

    grouped: whether it has its default process group, where the session is to have one.
    """

    serial: int
    rank: int
    status: str
    failure: Failure | None = None
    result: str | None = None
    payload: bytes = b""
    names: list[str] | None = None
    memory: MemoryUsage | None = None
    grouped: bool = True


class Died(Message, frozen=True):
    """The process of a rank has ended. `serial`: the cell it ran, 0 for none. `cause`: whose end it follows from."""

    rank: int
    pid: int
    code: int
    stderr: str
    serial: int
    when: float
    cause: str = ""


class Notice(Message, frozen=True):
    """One line for the user."""

    text: str


class Remark(Message, frozen=True):
    """One line for the cell `serial`, while it runs. A later one with the same `topic` takes its place.

    same: it says what the last one said, with newer figures. stuck: the user may want to stop the cell. waits: what
    ranks wait in, and for whom.
    """

    serial: int
    text: str
    topic: str = ""
    same: bool = False
    stuck: bool = False
    waits: dict[int, str] = {}


class Recovered(Message, frozen=True):
    """What was done after the failed cell `serial`; empty text: nothing was amiss. Comes before its last reply.

    generation: of the process groups from now on. step: the step after which all ranks stopped together, 0 for none.
    seconds: that it took, from the last rank's end.
    """

    serial: int
    generation: int
    text: str
    step: int
    seconds: float


class Broken(Message, frozen=True):
    """The session is over: every rank is gone, and why."""

    text: str


class Answer(Message, frozen=True):
    """A rank's answer to Ask, or (rank -1) the controller's to AskController."""

    request: int
    rank: int
    data: dict[str, Any]


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


# --- controller and agent ----------------------------------------------------------------------------------


class Spawn(Message, frozen=True):
    """Fork a store and ranks from the template."""

    epoch: int
    options: StartOptions


class Kill(Message, frozen=True):
    """End the ranks of an epoch: after `grace` seconds by force."""

    epoch: int
    grace: float


class Spawned(Message, frozen=True):
    """A rank's process exists."""

    epoch: int
    rank: int
    pid: int


class Spawning(Message, frozen=True):
    """All ranks of the epoch are forked. `notes` are lines for the user."""

    epoch: int
    notes: list[str]


class SpawnFailed(Message, frozen=True):
    """The agent could not bring up the epoch; it has cleaned up what there was."""

    epoch: int
    text: str


class Exited(Message, frozen=True):
    """A process of the epoch has ended, its output is all read and its process group is gone. rank -1: the store.

    code: as subprocess has it, -9 for SIGKILL. cause: whose end it follows from, if it is not its own.
    """

    epoch: int
    rank: int
    pid: int
    code: int
    stderr: str
    when: float
    cause: str = ""


class Gone(Message, frozen=True):
    """No process of the epoch is left."""

    epoch: int


# --- controller and ranks ----------------------------------------------------------------------------------


class Ready(Message, frozen=True):
    """A rank is up. `failure` says why it is not."""

    rank: int
    device: str
    backend: str
    failure: str = ""


class Recover(Message, frozen=True):
    """Put this rank in order after a failed cell.

    generation: of the groups that are renewed. renew, stale, lost: names of groups that get a new backend, that only
    some members have, that had a member which is dead. count: how many groups are numbered.
    reset: whether models were caught in the middle of a step. ranks: all that are told the same.
    regroup: whether to make the default group again, which a cell has destroyed.
    """

    serial: int
    generation: int
    renew: list[str]
    stale: list[str]
    lost: list[str]
    dead: list[int]
    count: int
    reset: bool
    ranks: list[int]
    regroup: bool = False


class InOrder(Message, frozen=True):
    """A rank has done what Recover asked. `failure`: why it could not. grouped: as in Reply."""

    failure: str = ""
    gradients: bool = False
    notes: list[str] = []
    grouped: bool = True


class Quit(Message, frozen=True):
    """Leave in an orderly way: run what atexit has, then go."""


class RankSetup(msgspec.Struct, frozen=True):
    """What a rank needs to know, given to it by file descriptor.

    folder: for temporary files, which the agent removes when the rank has ended; empty: there is none.
    """

    epoch: int
    rank: int
    url: str
    server_key: bytes
    public_key: bytes
    secret_key: bytes
    token: bytes
    store_port: int
    gpu_count: int
    threads: int
    options: StartOptions
    folder: str = ""

    @property
    def local_rank(self) -> int:
        """Its number on this node; `rank` is that in the whole job."""
        return self.rank - self.options.ranks.start

    @property
    def world_size(self) -> int:
        """The ranks of the whole job."""
        return self.options.place.world_size if self.options.place is not None else self.options.count


AnyMessage = (
    Hello
    | Start
    | Execute
    | Interrupt
    | Ask
    | AskController
    | ReadLog
    | Credit
    | WidgetMessage
    | Returned
    | Stop
    | Watch
    | Look
    | Shutdown
    | Progress
    | Started
    | StartFailed
    | Stopped
    | Output
    | Display
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
)

_encode = msgspec.msgpack.Encoder(enc_hook=repr).encode


def encode(message: Any) -> bytes:
    """A message, or a part of one, as a frame. Lone surrogates, which no text in a frame can hold, are escaped.

    What the system has named (StartOptions) keeps them.
    """
    try:
        return _encode(message)
    except UnicodeEncodeError:
        plain = msgspec.to_builtins(message, builtin_types=(bytes,), enc_hook=repr)
        exact = isinstance(getattr(message, "options", None), StartOptions)
        return _encode(_mapped(plain, _as_bytes if exact else _escaped))


def _mapped(value: Any, change: Callable[[Any], Any]) -> Any:
    """A value of plain types, with all in it that is neither list nor dict changed."""
    if isinstance(value, dict):
        return {change(key): _mapped(item, change) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_mapped(item, change) for item in value]
    return change(value)


def _escaped(value: Any) -> Any:
    return value.encode(errors="backslashreplace").decode() if isinstance(value, str) else value


def _as_bytes(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    encoded = value.encode(errors="surrogatepass")
    return encoded if any("\ud800" <= letter <= "\udfff" for letter in value) else value


def _as_text(value: Any) -> Any:
    """What `_as_bytes` has made of a value is text again."""
    return _mapped(value, lambda item: item.decode(errors="surrogatepass") if isinstance(item, bytes) else item)


_decoder = msgspec.msgpack.Decoder(AnyMessage)


class _DisplayHead(msgspec.Struct, array_like=True, tag="Display"):
    rank: int
    sequence: int


_head_decoder = msgspec.msgpack.Decoder(_DisplayHead)


def sequence_of(frame: bytes) -> int | None:
    """The sequence number of a Display which can't be decoded as a whole; None: it is nothing like a Display."""
    try:
        return _head_decoder.decode(frame).sequence
    except msgspec.DecodeError:
        return None


def decode(frame: bytes) -> AnyMessage:
    """The message in a frame.

    Raises:
        msgspec.DecodeError: The frame is none of ours.
    """
    message: AnyMessage = _decoder.decode(frame)
    return message
