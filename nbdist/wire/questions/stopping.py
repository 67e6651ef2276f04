"""Questions about where ranks are in a cell, how it is stopped, and how their process groups continue."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import msgspec

from nbdist.wire.base.rank_spans import RankSpans
from nbdist.wire.messages.healing import GroupRecipe
from nbdist.wire.questions.question import AnswerBody, Done, Question

# --- the main thread's position


class GroupState(msgspec.Struct, array_like=True, frozen=True):
    """A rank's position in one process group.

    members: global ranks. entered: collectives since the cell began, by backend. cut: whether its connections were cut,
    or have broken.
    """

    members: RankSpans
    entered: list[int]
    cut: bool


class Position(AnswerBody, frozen=True):
    """What a rank is doing in a cell.

    running: the cell, 0 after its end. at: time of this answer, in seconds. position: changes when the thread moves.
    cpu: seconds it has used or waited for. collective: the torch.distributed call it is in, "" for none.
    members: the ranks that must take part in it; None for all; empty if unknown. group: its group, "" if unknown.
    place, line: the position in words, without and with the code there. groups: by name.
    unfinished: by backend, the last collective started and the last one ended, where these differ.
    meeting: whether `collective` is one of nbdist's own functions, which all ranks of the cell must call.
    asking: whether it waits for the user: for a line, or at a breakpoint.
    label: the group in words. sequence: which collective of the group it is in, counted from 1; 0 if unknown.
    tensors: what it was called with, for example "float32[16, 8]"; "" if unknown.
    """

    running: int
    at: float
    position: str = ""
    cpu: float = 0.0
    collective: str = ""
    members: RankSpans | None = RankSpans()
    group: str = ""
    place: str = ""
    line: str = ""
    groups: dict[str, GroupState] = {}
    unfinished: Mapping[str, tuple[int, int]] = {}
    meeting: bool = False
    asking: bool = False
    label: str = ""
    sequence: int = 0
    tensors: str = ""


class GetPosition(Question[Position], frozen=True):
    """Where is the main thread in the cell `serial`?"""

    serial: int


class ThreadStack(AnswerBody, frozen=True):
    """The main thread's stack.

    running: the cell, 0 for none. line: its position in words. stack: a line per call. collective: as in Position.
    still: seconds since it was first seen exactly there.
    """

    running: int = 0
    line: str = ""
    stack: str = ""
    collective: str = ""
    still: float = 0.0


class GetStack(Question[ThreadStack], frozen=True):
    """What is the main thread's stack?"""


class NativeStack(AnswerBody, frozen=True):
    """The main thread's stack as py-spy sees it, with the frames of C code.

    frames: the outermost first. obstacle: why there are none ("missing": there is no py-spy on that node; "refused":
    the system does not allow it). text: more on that.
    """

    frames: list[str] = []
    obstacle: Literal["", "missing", "refused", "late", "other"] = ""
    text: str = ""


class GetNativeStack(Question[NativeStack], frozen=True):
    """What is the stack, C code included? Answered by the rank's agent."""


class ProcessState(AnswerBody, frozen=True):
    """A rank's process as the system sees it. state: a letter as in /proc/PID/stat; "T": stopped by a signal."""

    pid: int
    state: str


class GetProcess(Question[ProcessState], frozen=True):
    """In which state is the process? Answered by the rank's agent, as a stopped process answers nothing."""


# --- the collectives so far


class Collective(msgspec.Struct, array_like=True, frozen=True):
    """A collective that a rank has entered.

    group: its name; label: in words. sequence: which of its group. name: for example "all_reduce".
    tensors: what it was called with, for example "float32[16, 8]". ended: whether it has.
    """

    group: str
    label: str
    sequence: int
    name: str
    tensors: str
    ended: bool


class Flight(AnswerBody, frozen=True):
    """The last collectives of a rank, the oldest first. groups: the names of those it is in.

    recorded: whether torch has recorded any.
    """

    collectives: list[Collective]
    groups: list[str]
    recorded: bool


class GetFlight(Question[Flight], frozen=True):
    """Which collectives has this rank entered last? `count`: at most how many."""

    count: int


# --- stopping a cell


class StepsMade(AnswerBody, frozen=True):
    """The optimizer steps of a cell.

    count: steps made. stepping: whether it is inside another one. running: whether the cell has not ended; it may not
    have started. age: seconds since the last step, None without one. median: recent seconds per step, None with fewer
    than two.
    """

    count: int
    stepping: bool
    running: bool
    age: float | None = None
    median: float | None = None


class Arm(Question[StepsMade], frozen=True):
    """Wait at the end of the next step in this cell, until the step to stop at is known."""

    serial: int


class Aim(Question[Done], frozen=True):
    """Stop after the step `target`, when the loop's body is finished."""

    serial: int
    target: int


class Meet(Question[Done], frozen=True):
    """Interrupt the cell, but not before it has made the step `target`, which others have made."""

    serial: int
    target: int


class Disarm(Question[Done], frozen=True):
    """Cancel the stop."""

    serial: int


class Cut(Question[Done], frozen=True):
    """Free the main thread from a collective; without `force` only if it does not move."""

    serial: int
    force: bool


class Strand(Question[Done], frozen=True):
    """Free the main thread, which waits for something that can't happen any more. `why` becomes its error."""

    serial: int
    why: str


# --- a line from the user


class Enter(Question[Done], frozen=True):
    """What the user has entered at the Prompt `number`.

    outcome: "entered"; "end" (of the input: Ctrl-D); "refused", with the reason as `text`.
    """

    number: int
    text: str = ""
    outcome: Literal["entered", "end", "refused"] = "entered"


class Rest(Question[Done], frozen=True):
    """Another rank waits for the user: wait for the others without a limit, until the end of the cell `serial`."""

    serial: int


# --- process groups after a cell


class RankState(AnswerBody, frozen=True):
    """A rank's position after a cell.

    groups: by name. count: how many groups have been numbered. current: whether it has begun no other cell since.
    recipes: of the same groups, if they were asked for.
    caught: whether what went wrong may have caught a model in the middle of a step. steps: made by the cell.
    rescheduled: whether learning rates have changed since the last of them. lifetime: steps of all cells, if exact.
    stopped: the step after which our stop ended it, None if something else did.
    """

    groups: dict[str, GroupState]
    count: int
    current: bool
    caught: bool = False
    steps: int = 0
    rescheduled: bool = False
    lifetime: int = 0
    stopped: int | None = None
    recipes: dict[str, GroupRecipe] = {}


class GetState(Question[RankState], frozen=True):
    """Where is this rank after the cell `serial`? recipes: whether to report how its groups are made."""

    serial: int
    recipes: bool = False


class Forbidden(AnswerBody, frozen=True):
    """Groups that raise when used: their members (global ranks), by name."""

    groups: dict[str, list[int]]


class Forbid(Question[Forbidden], frozen=True):
    """Make using these groups an error until they are renewed; None for all groups."""

    groups: list[str] | None
