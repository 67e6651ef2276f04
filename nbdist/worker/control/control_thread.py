"""A rank's control thread: answers at once, also while a cell runs or a collective blocks.

Owns the control lane. Never runs anything of the user's, nor waits for a lock that a cell may hold.
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
import traceback
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

import zmq

from nbdist.errors import NbdistError
from nbdist.wire.base.message import Message
from nbdist.wire.frames import decode, encode
from nbdist.wire.messages.cells import Interrupt
from nbdist.wire.questions.debug_bytes import DebugBytes, OpenDebugger, TellDebugger
from nbdist.wire.questions.question import NoAnswer, Question
from nbdist.wire.questions.questions import Answer, AnyAnswer, Ask
from nbdist.worker.control.debug_stream import DebugStream
from nbdist.worker.control.slow_questions import Questions, Work
from nbdist.worker.lanes import streams

LaterWork = Callable[[Any, Callable[[Any], None]], None]  # from a question, and what sends its answer


class Waker:
    """Has the control thread look at what is due again."""

    def __init__(self) -> None:
        self.descriptor, self._write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)

    def wake(self) -> None:
        """Wake it. From any thread."""
        with contextlib.suppress(BlockingIOError):  # it has been woken already
            os.write(self._write, b".")

    def drain(self) -> None:
        """Forget that it was woken. In the control thread."""
        os.read(self.descriptor, 4096)


class CellStop(Protocol):
    """What ends the cells of a rank: `worker.recovery.rank_stop`. Its methods are called in the control thread."""

    answers: dict[type[Question[Any]], Work]
    later: dict[type[Question[Any]], LaterWork]

    @property
    def running(self) -> int:
        """The serial number of the cell that runs, 0 for none."""

    def interrupt(self, order: Interrupt) -> None:
        """Interrupt a cell, now or when it starts."""

    def due(self) -> float | None:
        """Return the seconds until `tick` should be called; None: nothing is under way."""

    def tick(self) -> None:
        """Go on with what a cell has not heeded."""


class ControlThread:
    """Answers questions about this rank and interrupts its cells.

    Args:
        socket: The control lane; from `start` on it belongs to the thread.
        rank: This rank.
        stale: Seconds after which nobody waits for an answer any more.
        stop: Ends cells.
        waker: Wakes this thread.

    Attributes:
        answers: What answers questions at once, by their type.
        questions: Those whose answers may take their time.
    """

    def __init__(self, socket: zmq.Socket[bytes], rank: int, stale: float, stop: CellStop, waker: Waker) -> None:
        self._socket = socket
        self._rank = rank
        self._stop = stop
        self._waker = waker
        self._debugger = DebugStream(self._say_of_debugger)
        self.answers: dict[type[Question[Any]], Work] = dict([TellDebugger.by(self._debugger.tell)]) | stop.answers
        self.questions = Questions(rank, lambda: not stop.running, self._answer_later, stale)
        self._answered: deque[bytes] = deque()

    def renumber(self, rank: int) -> None:
        """Answer as another rank from now on."""
        self._rank = self.questions.rank = rank

    def start(self) -> None:
        self.questions.start()
        threading.Thread(target=self._run, name="nbdist-control", daemon=True).start()

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._waker.descriptor, zmq.POLLIN)
        while True:
            try:
                self._turn(poller)
            except Exception:  # without this thread nothing could stop a cell any more
                streams.show_exception()

    def _turn(self, poller: zmq.Poller) -> None:
        due = self._stop.due()
        ready = dict(poller.poll(None if due is None else int(due * 1000) + 1))
        if self._waker.descriptor in ready:
            self._waker.drain()
        while self._answered:
            self._socket.send(self._answered.popleft())
        self._stop.tick()
        if self._socket in ready:
            self._handle(self._socket.recv())

    def _handle(self, frame: bytes) -> None:
        message = decode(frame)
        if isinstance(message, Interrupt):
            self._stop.interrupt(message)
        elif isinstance(message, Ask) and type(message.question) in self.questions:
            self.questions.put(message)
        elif isinstance(message, Ask) and isinstance(message.question, OpenDebugger):
            self._debugger.open(message.request, message.question)
        elif isinstance(message, Ask) and (later := self._stop.later.get(type(message.question))) is not None:
            later(message.question, functools.partial(self._say_later, message))
        elif isinstance(message, Ask):
            self._socket.send(self._answer(message, self.answers[type(message.question)]))

    def _answer_later(self, message: Ask, work: Work) -> None:
        """Send an answer from the thread that computed it: the socket belongs to this one."""
        self._answered.append(self._answer(message, work))
        self._waker.wake()

    def _say_later(self, message: Ask, answer: AnyAnswer) -> None:
        self.say(Answer(message.request, self._rank, answer, message.asker))

    def say(self, message: Message) -> None:
        """Send what is nobody's answer. From any thread, and from handlers of signals."""
        self._answered.append(encode(message))
        self._waker.wake()

    def _say_of_debugger(self, request: int, said: DebugBytes) -> None:
        self._answered.append(encode(Answer(request, self._rank, said)))
        self._waker.wake()

    def _answer(self, message: Ask, work: Work) -> bytes:
        """Return the answer's frame, whatever the work raises or returns: the thread must outlive any question."""
        try:
            return encode(Answer(message.request, self._rank, work(message.question), message.asker))
        except NbdistError as error:
            return encode(Answer(message.request, self._rank, NoAnswer(str(error)), message.asker))
        except BaseException as error:  # a repr of the user's may raise SystemExit
            why = traceback.format_exception_only(type(error), error)[-1].strip()
            return encode(Answer(message.request, self._rank, NoAnswer(why), message.asker))
