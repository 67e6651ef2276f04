"""A rank's control thread: answers at once, also while a cell runs or a collective blocks.

Owns the control lane. Knows the interrupt gate and the shell's names; never runs anything of the user's.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Callable
from typing import Any

import msgspec
import zmq

from nbdist.metrics import device, host
from nbdist.protocol import Answer, Ask, Interrupt, decode, encode
from nbdist.worker.interrupts import InterruptGate
from nbdist.worker.shell import RankShell


class ControlThread:
    """Answers questions about this rank and interrupts its cells.

    Args:
        context: Where to make the wake-up sockets.
        socket: The control lane; from `start` on it belongs to the thread.
        rank: This rank.

    Attributes:
        gate: Who may be interrupted.
        shell: The shell whose names are completed.
        answers: Questions that others answer, by name.
        gpu: The rank's GPU, as torch counts.
        on_interrupt: Called when KeyboardInterrupt is asked for.
        overdue: Seconds until a stop at the end of a step should be given up, None if none is pending.
        on_overdue: Called then.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], socket: zmq.Socket[bytes], rank: int) -> None:
        self._socket = socket
        self._rank = rank
        self._wake_read, self._wake_write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self.gate = InterruptGate(self.wake)
        self.shell: RankShell | None = None
        self.on_interrupt: Callable[[], None] = lambda: None
        self.overdue: Callable[[], float | None] = lambda: None
        self.on_overdue: Callable[[], None] = lambda: None
        self.answers: dict[str, Callable[..., dict[str, Any]]] = {
            "complete": self._complete,
            "inspect": self._inspect,
            "memory": self.memory,
            "metrics": self._metrics,
            "steps": self._steps,
        }
        self.gpu = 0
        self._inherited = host.anonymous_memory()

    def start(self) -> None:
        threading.Thread(target=self._run, name="nbdist-control", daemon=True).start()

    def wake(self) -> None:
        """Look at what is due anew. From any thread."""
        with contextlib.suppress(BlockingIOError):  # it has been woken already
            os.write(self._wake_write, b".")

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._wake_read, zmq.POLLIN)
        while True:
            dues = [due for due in (self.gate.resend_due(), self.overdue()) if due is not None]
            ready = dict(poller.poll(int(min(dues) * 1000) + 1 if dues else None))
            if self._wake_read in ready:
                os.read(self._wake_read, 4096)
            self.gate.resend()
            if self.overdue() == 0.0:
                self.on_overdue()
            if self._socket in ready:
                self._handle(self._socket.recv())

    def _handle(self, frame: bytes) -> None:
        message = decode(frame)
        if isinstance(message, Interrupt):
            self.on_interrupt()
            self.gate.request(message.serial)
        elif isinstance(message, Ask):
            try:
                data = self.answers[message.question](**message.arguments)
            except Exception as error:  # the thread must outlive any question
                data = {"error": f"{type(error).__name__}: {error}"}
            self._socket.send(encode(Answer(message.request, self._rank, data)))

    def _complete(self, code: str, position: int) -> dict[str, Any]:
        from IPython.core.completer import provisionalcompleter

        assert self.shell is not None
        with provisionalcompleter():
            found = list(self.shell.Completer.completions(code, position))
        return {"matches": [[item.text, item.type, item.start, item.end] for item in found[:500]]}

    def _inspect(self, name: str, detail: int) -> dict[str, Any]:
        assert self.shell is not None
        try:
            shell: Any = self.shell
            return {"found": True, "data": shell.object_inspect_mime(name, detail_level=detail)}
        except KeyError:
            return {"found": False}

    def _metrics(self) -> dict[str, Any]:
        """This rank for the panel, once a second: so nothing that takes longer than microseconds."""
        found: dict[str, Any] = msgspec.to_builtins(device.look(self._rank, self._inherited, self.gpu))
        return found

    def _steps(self) -> dict[str, Any]:
        """The training steps of what ran last here; empty if they are not measured."""
        steps: Any = sys.modules.get("nbdist.metrics.steps")
        lap = steps.last_lap() if steps is not None else None
        found: dict[str, Any] = {} if lap is None else {"steps": 0} | msgspec.to_builtins(lap)
        return found

    def memory(self) -> dict[str, Any]:
        data: dict[str, Any] = {"private": _private_memory()}
        cuda = sys.modules.get("torch.cuda")
        if cuda is not None and cuda.is_initialized():
            index = device.in_use(cuda, self.gpu)
            data["allocated"], data["reserved"] = cuda.memory_allocated(index), cuda.memory_reserved(index)
        return data


def _private_memory() -> int:
    """Bytes of memory that only this process uses: what it shares with the template costs nothing twice."""
    with open("/proc/self/smaps_rollup") as file:
        fields = (line.split() for line in file)
        return 1024 * sum(int(parts[1]) for parts in fields if parts[0] in ("Private_Clean:", "Private_Dirty:"))
