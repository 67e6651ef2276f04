"""Questions to a rank that may take their time, in a thread of their own: they run the user's code, or wait for a lock.

Completion and inspection evaluate names and call `__repr__`; what a process holds in memory is read under the kernel's
lock of its mappings. The control thread, which hears interrupts, never waits for any of it.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from typing import Any

import msgspec

from nbdist.metrics.node import device, host
from nbdist.wire.questions import Ask
from nbdist.worker.cell.main_thread import MainThreadLook
from nbdist.worker.cell.shell import RankShell

_STALE = 1.0  # seconds after which nobody waits for an answer any more


class Questions:
    """Answers such questions, one after the other.

    Args:
        rank: This rank.
        idle: Whether the main thread waits for work.
        answer: Called in this thread with a question and what gives its answer.

    Attributes:
        shell: The shell whose names are completed.
        gpu: The rank's GPU, as torch counts.
    """

    def __init__(
        self, rank: int, idle: Callable[[], bool], answer: Callable[[Ask, Callable[..., dict[str, Any]]], None]
    ) -> None:
        self.shell: RankShell | None = None
        self.gpu = 0
        self._rank = rank
        self._gpu = MainThreadLook(lambda: device.look_at_gpu(self.gpu), idle)
        self._answer = answer
        self._inherited = host.anonymous_memory()
        self._waiting: queue.SimpleQueue[tuple[float, Ask]] = queue.SimpleQueue()
        self._known: dict[str, Callable[..., dict[str, Any]]] = {
            "complete": self._complete,
            "inspect": self._inspect,
            "memory": self.memory,
            "metrics": self._metrics,
        }

    def __contains__(self, question: str) -> bool:
        return question in self._known

    def start(self) -> None:
        threading.Thread(target=self._run, name="nbdist-questions", daemon=True).start()

    def put(self, question: Ask) -> None:
        """Answer it as soon as those before it are answered. From any thread."""
        self._waiting.put((time.monotonic(), question))

    def _run(self) -> None:
        while True:
            asked_at, question = self._waiting.get()
            late = time.monotonic() - asked_at > _STALE
            self._answer(question, _too_late if late else self._known[question.question])

    def memory(self) -> dict[str, Any]:
        """Bytes that this rank holds: of the CPU's memory what it shares with nobody, of its GPU's, if it uses one."""
        figures = self._gpu.newest() if device.uses_gpu() else {}
        on_gpu: dict[str, Any] = {name: figures[name] for name in ("allocated", "reserved") if name in figures}
        return {"private": host.private_memory()} | on_gpu

    def _metrics(self) -> dict[str, Any]:
        """This rank for the panel, once a second: so nothing that costs more than microseconds."""
        found: dict[str, Any] = msgspec.to_builtins(device.look_at_host(self._rank, self._inherited))
        return found | (self._gpu.newest() if device.uses_gpu() else {})

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


def _too_late(**_: Any) -> dict[str, Any]:
    return {"error": "it was busy with another question"}
