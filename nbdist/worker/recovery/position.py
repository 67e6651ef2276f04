"""Where the main thread is and whether it moves: what the watch over a cell and the last rung of its stop need to know.

Runs in the control thread. Knows the interrupt gate and the process groups; never runs anything of the user's.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from types import FrameType
from typing import Any, NamedTuple

from nbdist.base import limits
from nbdist.wire.base.rank_spans import RankSpans
from nbdist.wire.questions.stopping import GetPosition, GetStack, GroupState, Position, ThreadStack
from nbdist.worker.cell import debug_server, stacks
from nbdist.worker.cell.interrupts import InterruptGate
from nbdist.worker.cell.keyboard import Keyboard
from nbdist.worker.groups.flight_record import Unfinished
from nbdist.worker.groups.process_groups import Collectives

_BUSY = 0.2  # of a core: a main thread that uses more is computing, not waiting
_MAKING = ("init_process_group", "new_group", "split_group", "new_subgroups")


class _Wait(NamedTuple):
    """What the main thread may wait in; the names are those of a Position."""

    collective: str
    members: RankSpans | None
    group: str = ""


class PositionProbe:
    """Looks at the main thread."""

    def __init__(self, collectives: Collectives, gate: InterruptGate, keyboard: Keyboard) -> None:
        self._collectives = collectives
        self._keyboard = keyboard
        self._gate = gate
        self._main = threading.main_thread().ident or 0
        self._marked_at = 0.0
        self._cpu = 0.0
        self._marked: tuple[str, Unfinished] = "", {}
        self._moved_at = 0.0
        self._seen: tuple[Any, ...] = ()
        self._seen_at = 0.0

    def mark(self) -> None:
        """Start measuring for `stands_still`."""
        self._marked_at, self._cpu = time.monotonic(), _cpu_seconds()
        self._marked, self._moved_at = (self._where(), self._unfinished()), self._marked_at

    def note_moves(self) -> None:
        """If the main thread has moved since the mark, measure from now on whether it stays in one place.

        torch notes up to 0.1 s late that a collective of NCCL's has ended. So a main thread that waits in the next one
        may seem to move once more after the mark: compared with that mark alone, it would never stand still.
        """
        (where, unfinished), now = self._marked, (self._where(), self._unfinished())
        if where != now[0] or not any(unfinished.get(name) == at for name, at in now[1].items()):
            self._marked, self._moved_at = now, time.monotonic()

    def stands_still(self) -> bool:
        """Return whether the main thread waits: it has hardly used a processor since the mark, or it has been in
        one place for a while, and a collective that was under way then has not ended. CUDA uses a processor to wait.

        Never right after the mark, as this thread may have been late: both records are written later than it happens.
        """
        elapsed = time.monotonic() - self._marked_at
        if elapsed >= limits.IDLE_PROOF and (_cpu_seconds() - self._cpu) / elapsed < _BUSY:
            return True
        self.note_moves()
        return time.monotonic() - self._moved_at >= limits.PROOF

    def look(self, question: GetPosition) -> Position:
        """Return where the main thread is in the cell. In the control thread."""
        frame, running = self._frame(), self._gate.running
        # The numbers of a rank that has gone on to another cell can't be compared.
        groups = self._collectives.groups(current=True) if running in (0, question.serial) else {}
        if frame is None or running != question.serial:
            return Position(0, time.monotonic(), groups=groups)
        self._note(frame)
        call = stacks.torch_call(frame)
        unfinished = self._unfinished()
        wait = self._wait(frame, call, groups, unfinished)
        tensors, device = stacks.tensors_of(call)
        label, sequence = self._collectives.place_in(wait.group, device) if wait.group else ("", 0)
        return Position(
            running=running,
            at=time.monotonic(),
            position=_position(call.frame if call.frame is not None and call.meeting else frame),
            cpu=_cpu_seconds(),
            collective=wait.collective,
            members=wait.members,
            group=wait.group,
            place=stacks.place(frame),
            line=stacks.describe(frame),
            groups=groups,
            unfinished=unfinished,
            meeting=call.meeting,
            asking=self._keyboard.asking or debug_server.holds(frame),
            label=label,
            sequence=sequence,
            tensors=tensors,
        )

    def stack(self, question: GetStack) -> ThreadStack:
        """Return the main thread's stack. In the control thread."""
        frame, running = self._frame(), self._gate.running
        if frame is None or not running:
            return ThreadStack()
        self._note(frame)
        return ThreadStack(
            running=running,
            line=stacks.describe(frame),
            stack=stacks.render(frame),
            collective=self._wait(frame, stacks.torch_call(frame), {}, self._unfinished()).collective,
            still=time.monotonic() - self._seen_at,
        )

    def in_meeting(self) -> bool:
        """Return whether the main thread waits in one of nbdist's own functions for other ranks to call it, too."""
        frame = self._frame()
        return frame is not None and stacks.torch_call(frame).meeting

    def _frame(self) -> FrameType | None:
        return sys._current_frames().get(self._main)

    def _note(self, frame: FrameType) -> None:
        """Remember since when the main thread has been seen where it is."""
        entered = [(group.members, group.entered) for group in self._collectives.groups(current=True).values()]
        seen = (self._gate.running, _position(frame), entered)
        if seen != self._seen:
            self._seen, self._seen_at = seen, time.monotonic()

    def _where(self) -> str:
        frame = self._frame()
        return _position(frame) if frame is not None else ""

    def _unfinished(self) -> Unfinished:
        return self._collectives.record.unfinished() or {}

    def _wait(
        self, frame: FrameType, call: stacks.Call, groups: dict[str, GroupState], unfinished: Unfinished
    ) -> _Wait:
        if call.meeting:
            return _Wait(call.name, None)
        if call.name.startswith(_MAKING):
            return _Wait(call.name, _makers(call.frame))
        if call.frame is None and self._collectives.creating:
            return _Wait(call.name or "the making of a group", None)
        if call.frame is None:
            waits = bool(unfinished) or stacks.awaits_work(frame)
            return _Wait(call.name or ("a collective" if waits else ""), RankSpans())
        arguments = call.frame.f_locals
        name = self._collectives.name_of(arguments.get("group"))
        peer = arguments.get("src" if call.name.startswith("recv") else "dst")
        if call.name.startswith(("send", "recv")) and isinstance(peer, int):
            return _Wait(call.name, RankSpans.of([peer]), name)
        return _Wait(call.name, groups[name].members if name in groups else RankSpans(), name)


def _makers(frame: FrameType | None) -> RankSpans | None:
    """Return the ranks that have to take part in the making of a group; None: all."""
    arguments = frame.f_locals if frame is not None else {}
    ranks = arguments.get("ranks")
    return RankSpans.of(ranks) if ranks and arguments.get("use_local_synchronization") else None


def _position(frame: FrameType) -> str:
    return f"{id(frame)}:{frame.f_lasti}"


def _cpu_seconds() -> float:
    """Processor time that the main thread has used or waited for: on a busy machine one that computes gets little.

    The system's id of the main thread is that of the process.
    """
    with open(f"/proc/self/task/{os.getpid()}/schedstat") as file:
        used, waited, _ = file.read().split()
    return (int(used) + int(waited)) / 1e9
