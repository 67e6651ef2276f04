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

from nbdist.base import limits
from nbdist.metrics.node import device, host
from nbdist.wire.questions.held_variables import GetElements, GetEntries, GetFigures, GetGap, GetVariables
from nbdist.wire.questions.knowing import (
    Complete,
    CompletionItem,
    Completions,
    GetMemory,
    GetMetrics,
    Inspect,
    Inspection,
    Metrics,
    ProcessMemory,
)
from nbdist.wire.questions.question import NoAnswer, Question
from nbdist.wire.questions.questions import Ask
from nbdist.worker.cell.shell import RankShell
from nbdist.worker.control.main_thread import MainThreadLook
from nbdist.worker.control.variable_answers import VariableAnswers

Work = Callable[[Any], Any]  # from a question to its answer; `Question.by` has seen to it that they belong together


class Questions:
    """Answers such questions, one after the other.

    Args:
        rank: This rank.
        idle: Whether the main thread waits for work.
        answer: Called in this thread with a question and what gives its answer.
        stale: Seconds after which nobody waits for an answer any more.

    Attributes:
        rank: As above.
        shell: The shell whose names are completed.
        gpu: The rank's GPU, as torch counts.
        answers: What answers them, by their type.
    """

    def __init__(self, rank: int, idle: Callable[[], bool], answer: Callable[[Ask, Work], None], stale: float) -> None:
        self.shell: RankShell | None = None
        self.gpu = 0
        self.rank = rank
        self._gpu = MainThreadLook(lambda: device.look_at_gpu(self.gpu), idle)
        self._answer = answer
        self._stale = stale
        self._inherited = host.anonymous_memory()
        variables = VariableAnswers(lambda: self._shell.user_ns, self._hidden, idle)
        self._waiting: queue.SimpleQueue[tuple[float, Ask]] = queue.SimpleQueue()
        self.answers: dict[type[Question[Any]], Work] = dict(
            [
                Complete.by(self._complete),
                Inspect.by(self._inspect),
                GetMemory.by(lambda question: self.memory()),
                GetMetrics.by(self._metrics),
                GetVariables.by(variables.variables),
                GetFigures.by(variables.statistics),
                GetElements.by(variables.elements),
                GetEntries.by(variables.entries),
                GetGap.by(variables.gap),
            ]
        )

    def __contains__(self, question: type[Question[Any]]) -> bool:
        return question in self.answers

    def start(self) -> None:
        threading.Thread(target=self._run, name="nbdist-questions", daemon=True).start()

    def put(self, question: Ask) -> None:
        """Answer it as soon as those before it are answered. From any thread."""
        self._waiting.put((time.monotonic(), question))

    def _run(self) -> None:
        while True:
            asked_at, question = self._waiting.get()
            late = time.monotonic() - asked_at > self._stale
            self._answer(question, _too_late if late else self.answers[type(question.question)])

    @property
    def _shell(self) -> RankShell:
        assert self.shell is not None
        return self.shell

    def _hidden(self) -> set[str]:
        """Return the names that a shell has without the user."""
        return {*self._shell.user_ns_hidden, *self._shell.own_names}

    def memory(self) -> ProcessMemory:
        """Return the bytes that this rank holds."""
        private = host.private_memory()
        if not device.uses_gpu():
            return ProcessMemory(private)
        try:
            figures = self._gpu.newest(limits.STATUS_LOOK)
        except TimeoutError:
            return ProcessMemory(private, by_driver=device.memory_by_driver())
        return ProcessMemory(private, figures.get("allocated"), figures.get("reserved"))

    def _metrics(self, _: GetMetrics) -> Metrics:
        """Return this rank for the panel, once a second: so nothing that costs more than microseconds."""
        sample = device.look_at_host(self.rank, self._inherited)
        if not device.uses_gpu():
            return Metrics(sample)
        try:
            figures = self._gpu.newest(limits.PANEL_LOOK)
        except TimeoutError as error:
            figures = {"device": f"cuda:{self.gpu}", "why": f"torch can't be asked: {error}"}
        return Metrics(msgspec.structs.replace(sample, **figures))

    def _complete(self, question: Complete) -> Completions:
        from IPython.core.completer import provisionalcompleter

        assert self.shell is not None
        with provisionalcompleter():
            found = list(self.shell.Completer.completions(question.code, question.position))
        return Completions([CompletionItem(item.text, item.type, item.start, item.end) for item in found[:500]])

    def _inspect(self, question: Inspect) -> Inspection:
        assert self.shell is not None
        try:
            shell: Any = self.shell
            return Inspection(shell.object_inspect_mime(question.name, detail_level=question.detail))
        except KeyError:
            return Inspection(None)


def _too_late(_: Question[Any]) -> NoAnswer:
    return NoAnswer("it was busy with another question")
