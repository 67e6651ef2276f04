"""Where the main thread is and whether it moves: what the watch over a cell and the last rung of its stop need to know.

Runs in the control thread. Knows the interrupt gate and the process groups; never runs anything of the user's.
"""

from __future__ import annotations

import os
import sys
import threading
import time
import types
from typing import Any

from nbdist.worker import stacks
from nbdist.worker.collectives import Collectives
from nbdist.worker.interrupts import InterruptGate

_BUSY = 0.2  # of a core: a main thread that uses more is computing, not waiting


class Progress:
    """Looks at the main thread."""

    def __init__(self, collectives: Collectives, gate: InterruptGate) -> None:
        self._collectives = collectives
        self._gate = gate
        self._main = threading.main_thread().ident or 0
        self._marked_at = 0.0
        self._cpu = 0.0

    def mark(self) -> None:
        """From now on `stands_still` counts."""
        self._marked_at, self._cpu = time.monotonic(), _cpu_seconds()

    def stands_still(self) -> bool:
        """Whether the main thread has hardly used a processor since the mark: it waits for something."""
        elapsed = max(1e-3, time.monotonic() - self._marked_at)
        return (_cpu_seconds() - self._cpu) / elapsed < _BUSY

    def look(self, serial: int) -> dict[str, Any]:
        """Where the main thread is in the cell.

        Returns:
            "running": the cell, 0 when it has ended. "position": changes when the thread moves. "cpu": seconds it has
            used. "collective": what of torch.distributed it is in, "" for nothing. "line": its place, in words.
            "groups": as `Collectives.state` has them.
        """
        groups = self._collectives.state(current=True)["groups"]
        frame = sys._current_frames().get(self._main)
        if frame is None or self._gate.running != serial:
            return {"running": 0, "position": "", "cpu": 0.0, "collective": "", "line": "", "groups": groups}
        return {
            "running": serial,
            "position": f"{id(frame)}:{frame.f_lasti}",
            "cpu": _cpu_seconds(),
            "collective": _collective(frame) or ("the making of a group" if self._collectives.creating else ""),
            "line": stacks.describe(frame)[0],
            "groups": groups,
        }


def _collective(frame: types.FrameType | None) -> str:
    """The function of torch.distributed that was called, or "backward"; "" for neither."""
    found = ""
    while frame is not None:
        name, filename = frame.f_code.co_name, frame.f_code.co_filename
        if "/torch/distributed/" in filename and name != "wrapper":
            found = name
        elif filename.endswith("/torch/autograd/graph.py") and not found:
            found = "backward"
        frame = frame.f_back
    return found


def _cpu_seconds() -> float:
    """Processor time of the main thread, whose system id is that of the process."""
    with open(f"/proc/self/task/{os.getpid()}/schedstat") as file:
        return int(file.read().split()[0]) / 1e9
