"""Work for ranks: how it is stopped, how it ended, and what was repaired afterwards."""

from __future__ import annotations

from typing import Literal

import msgspec

from nbdist.metrics.memory import MemoryUsage
from nbdist.metrics.node.sample import StepSample
from nbdist.wire.base.message import Message, Seconds
from nbdist.wire.base.parcel import Parcel

Kind = Literal["cell", "call", "setup", "launch", "push", "pull", "free", "debug", "debugpy"]  # of an Execute
FailureKind = Literal["raised", "lost", "interrupted", "stopped"]
Outcome = Literal["ok", "error", "interrupted"]


class Metered(msgspec.Struct, array_like=True, frozen=True):
    """What ranks measure of an Execute and report in the reply: the memory it cost, the training steps it made."""

    memory: bool = False
    steps: bool = False


class Execute(Message, frozen=True):
    """Run something on the main thread of ranks.

    kind: "cell" (code in the shell), "call" (a pickled function), "setup" (one of nbdist's own), "launch" (one that may
    return values that can't be sent), "push" (a pickled dict), "pull" (an expression in `code`), "free",
    "debug" (what has failed last), "debugpy" (listen for JupyterLab or VS Code).
    number: the cell's number in the notebook. offset: lines of the cell above `code`. file: what debuggers know the
    cell's code by, "" while none is on.
    grace: seconds that ranks may wait in a collective for one that has raised.
    parcel: the function and its arguments, or the variables, where `kind` says so.
    profile: a folder for the ranks' traces; "": nothing is profiled. The reply's payload is then the summary.
    memory: whether the reply tells what it cost in memory.
    setup: whether the user has marked it as one that newcomers run.
    """

    serial: int
    ranks: list[int]
    kind: Kind
    code: str
    number: int = 0
    offset: int = 0
    parcel: Parcel | None = None
    grace: Seconds = 1.0
    profile: str = ""
    metered: Metered = Metered()
    setup: bool = False
    file: str = ""


class Interrupt(Message, frozen=True):
    """Stop ranks that still run the cell `serial`. When sent to a rank: raise KeyboardInterrupt there.

    now: don't wait for the end of a step, for a rank to leave a collective by itself, or for what its code does about
    an earlier one.
    patience: seconds after which a rank that still runs counts as stuck; None for the default of cells.
    """

    serial: int
    ranks: list[int]
    now: bool = False
    patience: Seconds | None = None


class Interrupted(Message, frozen=True):
    """An interrupt has reached the rank's own code, which may save its state."""

    rank: int


class Returned(Message, frozen=True):
    """Ranks on other nodes of the launch `serial` have returned: they take part in nothing any more."""

    serial: int
    ranks: list[int]


class Failure(msgspec.Struct, frozen=True):
    """An exception on a rank, as text and, if possible, pickled. `when` is on the machine's monotonic clock.

    kind: "raised", "lost" (torch lost contact with another rank), "interrupted", "stopped" (between two steps).
    """

    name: str
    text: str
    traceback: str
    when: float
    pickled: bytes | None = None
    kind: FailureKind = "raised"


class Reply(Message, frozen=True):
    """A rank has finished an Execute.

    parcel: the value that it sends. payload: the summary of a profile, what was freed, or debugpy's port.
    grouped: whether it has its default process group, where the session is to have one. caught: whether it was
    interrupted, and its code has caught that. broken: whether a process group has lost a connection.
    """

    serial: int
    rank: int
    status: Outcome
    failure: Failure | None = None
    result: str | None = None
    parcel: Parcel | None = None
    payload: bytes = b""
    names: list[str] | None = None
    memory: MemoryUsage | None = None
    steps: StepSample | None = None
    grouped: bool = True
    caught: bool = False
    broken: bool = False


class Remark(Message, frozen=True):
    """One line for the cell `serial`, while it runs. A later one with the same `topic` replaces it.

    same: it repeats the last line with newer figures. stuck: the user may want to stop the cell. waits: what ranks wait
    in, and for which ranks.
    """

    serial: int
    text: str
    topic: str = ""
    same: bool = False
    stuck: bool = False
    waits: dict[int, str] = {}


class Recover(Message, frozen=True):
    """Repair this rank after a failed cell.

    generation: of the groups to be renewed. renew: names of groups that get a new backend; stale: that only part of the
    members have; lost: that had a dead member. count: how many groups are numbered.
    reset: whether models were caught in the middle of a step. ranks: all ranks that get this message.
    regroup: whether to recreate the default group, which a cell has destroyed.
    steps: as RankState.lifetime, the largest.
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
    steps: int = 0


class InOrder(Message, frozen=True):
    """A rank has carried out a Recover or an Adopt. failure: why it could not. grouped: as in Reply."""

    failure: str = ""
    gradients: bool = False
    notes: list[str] = []
    grouped: bool = True


class Recovered(Message, frozen=True):
    """What was repaired after the failed cell `serial`; empty text if nothing was wrong. Comes before its last reply.

    generation: of the process groups from now on. step: the step after which all ranks stopped together, 0 for none.
    seconds: how long it took, from the last rank's end.
    """

    serial: int
    generation: int
    text: str
    step: int
    seconds: float
