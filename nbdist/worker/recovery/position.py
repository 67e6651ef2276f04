"""Where the main thread is and whether it moves: what the watch over a cell and the last rung of its stop need to know.

Runs in the control thread. Knows the interrupt gate and the process groups; never runs anything of the user's.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from types import FrameType
from typing import Any

from nbdist.worker.cell import stacks
from nbdist.worker.cell.interrupts import InterruptGate
from nbdist.worker.groups.flight_record import Unfinished
from nbdist.worker.groups.process_groups import Collectives

_BUSY = 0.2  # of a core: a main thread that uses more is computing, not waiting
_MAKING = ("init_process_group", "new_group", "split_group", "new_subgroups")


class Progress:
    """Looks at the main thread."""

    def __init__(self, collectives: Collectives, gate: InterruptGate) -> None:
        self._collectives = collectives
        self._gate = gate
        self._main = threading.main_thread().ident or 0
        self._marked_at = 0.0
        self._cpu = 0.0
        self._marked: tuple[str, Unfinished] = "", {}
        self._seen: tuple[Any, ...] = ()
        self._seen_at = 0.0

    def mark(self) -> None:
        """From now on `stands_still` counts."""
        self._marked_at, self._cpu = time.monotonic(), _cpu_seconds()
        self._marked = self._where(), self._unfinished()

    def stands_still(self) -> bool:
        """Whether the main thread waits for something: it has hardly used a processor since the mark, or it has been in
        one place since, while a collective that was under way then has not ended. CUDA uses a processor to wait.
        """
        elapsed = max(1e-3, time.monotonic() - self._marked_at)
        if (_cpu_seconds() - self._cpu) / elapsed < _BUSY:
            return True
        where, unfinished = self._marked
        return where == self._where() and any(unfinished.get(name) == at for name, at in self._unfinished().items())

    def look(self, serial: int) -> dict[str, Any]:
        """Where the main thread is in the cell.

        Returns:
            "running": the cell, 0 when it has ended. "at": when this was so, in seconds. "position": changes when the
            thread moves. "cpu": seconds it has used or waited for. "collective": what of torch.distributed it is in, ""
            for nothing. "members": the ranks that have to take part in that; None: all; empty: not known. "group": in
            which group, "" where that is not known. "place", "line": its place, in words, without and with the code
            there. "groups": as `Collectives.state` has them. "unfinished": as `Record` has it. "meeting": whether
            "collective" is one of nbdist's own functions, which all ranks of the cell have to call.
        """
        frame, running = self._frame(), self._gate.running
        # The numbers of a rank that has gone on to another cell can't be compared.
        groups = self._collectives.state(current=True)["groups"] if running in (0, serial) else {}
        found: dict[str, Any] = {
            "running": 0,
            "at": time.monotonic(),
            "position": "",
            "cpu": 0.0,
            "collective": "",
            "members": [],
            "group": "",
            "place": "",
            "line": "",
            "groups": groups,
            "unfinished": {},
            "meeting": False,
        }
        if frame is None or running != serial:
            return found
        self._note(frame)
        call = stacks.torch_call(frame)
        unfinished = self._unfinished()
        return found | {
            "running": serial,
            "position": _position(call.frame if call.frame is not None and call.meeting else frame),
            "cpu": _cpu_seconds(),
            "place": stacks.place(frame),
            "line": stacks.describe(frame),
            "unfinished": unfinished,
            **self._collective(frame, call, groups, unfinished),
        }

    def stack(self) -> dict[str, Any]:
        """The main thread's stack.

        Returns:
            "running": the cell, 0 for none. "line": its place in words. "stack": a line for each call.
            "collective": as `look` has it. "still": seconds since it was first seen exactly there.
        """
        frame, running = self._frame(), self._gate.running
        if frame is None or not running:
            return {"running": 0, "line": "", "stack": "", "collective": "", "still": 0.0}
        self._note(frame)
        return {
            "running": running,
            "line": stacks.describe(frame),
            "stack": stacks.render(frame),
            "collective": self._collective(frame, stacks.torch_call(frame), {}, self._unfinished())["collective"],
            "still": time.monotonic() - self._seen_at,
        }

    def in_meeting(self) -> bool:
        """Whether the main thread waits in one of nbdist's own functions for other ranks to call it, too."""
        frame = self._frame()
        return frame is not None and stacks.torch_call(frame).meeting

    def _frame(self) -> FrameType | None:
        return sys._current_frames().get(self._main)

    def _note(self, frame: FrameType) -> None:
        """Remember since when the main thread has been seen where it is."""
        entered = [group[:2] for group in self._collectives.state(current=True)["groups"].values()]
        seen = (self._gate.running, _position(frame), entered)
        if seen != self._seen:
            self._seen, self._seen_at = seen, time.monotonic()

    def _where(self) -> str:
        frame = self._frame()
        return _position(frame) if frame is not None else ""

    def _unfinished(self) -> Unfinished:
        return self._collectives.record.unfinished() or {}

    def _collective(
        self, frame: FrameType, call: stacks.Call, groups: dict[str, Any], unfinished: Unfinished
    ) -> dict[str, Any]:
        if call.meeting:
            return {"collective": call.name, "members": None, "meeting": True}
        if call.name.startswith(_MAKING):
            return {"collective": call.name, "members": _makers(call.frame)}
        if call.frame is None and self._collectives.creating:
            return {"collective": call.name or "the making of a group", "members": None}
        if call.frame is None:
            waits = bool(unfinished) or stacks.awaits_work(frame)
            return {"collective": call.name or ("a collective" if waits else "")}
        arguments = call.frame.f_locals
        name = self._collectives.name_of(arguments.get("group"))
        peer = arguments.get("src" if call.name.startswith("recv") else "dst")
        if call.name.startswith(("send", "recv")) and isinstance(peer, int):
            return {"collective": call.name, "members": [peer], "group": name}
        return {"collective": call.name, "members": groups[name][0] if name in groups else [], "group": name}


def _makers(frame: FrameType | None) -> list[int] | None:
    """The ranks that have to take part in the making of a group; None: all."""
    arguments = frame.f_locals if frame is not None else {}
    ranks = arguments.get("ranks")
    return list(ranks) if ranks and arguments.get("use_local_synchronization") else None


def _position(frame: FrameType) -> str:
    return f"{id(frame)}:{frame.f_lasti}"


def _cpu_seconds() -> float:
    """Processor time that the main thread has used or waited for: on a busy machine one that computes gets little.

    The system's id of the main thread is that of the process.
    """
    with open(f"/proc/self/task/{os.getpid()}/schedstat") as file:
        used, waited, _ = file.read().split()
    return (int(used) + int(waited)) / 1e9
