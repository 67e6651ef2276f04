"""A rank's control thread: answers at once, also while a cell runs or a collective blocks.

Owns the control lane. Knows the interrupt gate; never runs anything of the user's, nor waits for a lock that a cell may
hold.
"""

from __future__ import annotations

import contextlib
import os
import threading
import traceback
from collections import deque
from collections.abc import Callable
from typing import Any

import zmq

from nbdist.errors import NbdistError
from nbdist.wire.frames import decode, encode
from nbdist.wire.messages.cells import Interrupt
from nbdist.wire.questions.debug_bytes import DebugBytes, OpenDebugger, TellDebugger
from nbdist.wire.questions.question import NoAnswer, Question
from nbdist.wire.questions.questions import Answer, Ask
from nbdist.worker.cell.interrupts import InterruptGate
from nbdist.worker.control.debug_stream import DebugStream
from nbdist.worker.control.slow_questions import Questions, Work
from nbdist.worker.lanes import streams


class ControlThread:
    """Answers questions about this rank and interrupts its cells.

    Args:
        context: Where to make the wake-up sockets.
        socket: The control lane; from `start` on it belongs to the thread.
        rank: This rank.
        stale: Seconds after which nobody waits for an answer any more.

    Attributes:
        gate: Who may be interrupted.
        answers: What answers questions at once, by their type.
        questions: Those whose answers may take their time.
        on_interrupt: Called when KeyboardInterrupt is asked for.
        on_resend: Called when it has been sent again, because it has not ended the cell.
        overdue: Seconds until a stop at the end of a step should be given up, None if none is pending.
        on_overdue: Called then.
    """

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], socket: zmq.Socket[bytes], rank: int, stale: float
    ) -> None:
        self._socket = socket
        self._rank = rank
        self._wake_read, self._wake_write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self.gate = InterruptGate(self.wake)
        self.on_interrupt: Callable[[], None] = lambda: None
        self.on_resend: Callable[[], None] = lambda: None
        self.overdue: Callable[[], float | None] = lambda: None
        self.on_overdue: Callable[[], None] = lambda: None
        self._debugger = DebugStream(self._say_of_debugger)
        self.answers: dict[type[Question[Any]], Work] = dict([TellDebugger.by(self._debugger.tell)])
        self.questions = Questions(rank, lambda: not self.gate.running, self._answer_later, stale)
        self._answered: deque[bytes] = deque()

    def renumber(self, rank: int) -> None:
        """Answer as another rank from now on."""
        self._rank = self.questions.rank = rank

    def start(self) -> None:
        self.questions.start()
        threading.Thread(target=self._run, name="nbdist-control", daemon=True).start()

    def wake(self) -> None:
        """Look at what is due again. From any thread."""
        with contextlib.suppress(BlockingIOError):  # it has been woken already
            os.write(self._wake_write, b".")

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._wake_read, zmq.POLLIN)
        while True:
            try:
                self._turn(poller)
            except Exception:  # without this thread nothing could stop a cell any more
                streams.show_exception()

    def _turn(self, poller: zmq.Poller) -> None:
        dues = [due for due in (self.gate.resend_due(), self.overdue()) if due is not None]
        ready = dict(poller.poll(int(min(dues) * 1000) + 1 if dues else None))
        if self._wake_read in ready:
            os.read(self._wake_read, 4096)
        while self._answered:
            self._socket.send(self._answered.popleft())
        if self.gate.resend():
            self.on_resend()
        if self.overdue() == 0.0:
            self.on_overdue()
        if self._socket in ready:
            self._handle(self._socket.recv())

    def _handle(self, frame: bytes) -> None:
        message = decode(frame)
        if isinstance(message, Interrupt):
            if self.gate.is_settled(message.serial) and not message.now:
                return
            try:
                self.on_interrupt()
            finally:
                self.gate.request(message.serial, again=message.now)
        elif isinstance(message, Ask) and type(message.question) in self.questions:
            self.questions.put(message)
        elif isinstance(message, Ask) and isinstance(message.question, OpenDebugger):
            self._debugger.open(message.request, message.question)
        elif isinstance(message, Ask):
            self._socket.send(self._answer(message, self.answers[type(message.question)]))

    def _answer_later(self, message: Ask, work: Work) -> None:
        """Send an answer from the thread that computed it: the socket belongs to this one."""
        self._answered.append(self._answer(message, work))
        self.wake()

    def _say_of_debugger(self, request: int, said: DebugBytes) -> None:
        self._answered.append(encode(Answer(request, self._rank, said)))
        self.wake()

    def _answer(self, message: Ask, work: Work) -> bytes:
        """Return the answer's frame, whatever the work raises or returns: the thread must outlive any question."""
        try:
            return encode(Answer(message.request, self._rank, work(message.question), message.asker))
        except NbdistError as error:
            return encode(Answer(message.request, self._rank, NoAnswer(str(error)), message.asker))
        except BaseException as error:
            why = traceback.format_exception_only(type(error), error)[-1].strip()
            return encode(Answer(message.request, self._rank, NoAnswer(why), message.asker))
