"""Where a process stands still after an optimizer step, for one visitor at a time, who may run code there.

It goes on when the visitor says so, is gone, or has had the time that it may take: nobody else is needed for that.
Independent of how steps are counted.
"""

from __future__ import annotations

import contextlib
import ctypes
import enum
import queue
import socket
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType

import msgspec

from nbdist.base.checks import LONGEST
from nbdist.errors import StaleGroupError
from nbdist.serving.collective_counts import entered_collectives
from nbdist.serving.control_messages import (
    BreakOff,
    CodeFailure,
    CodeRan,
    Controlled,
    ControlRefused,
    GoOn,
    Order,
    PauseAfter,
    Report,
    RunCode,
    StandsStill,
    StepPassed,
    TakeControl,
    WentOn,
)
from nbdist.serving.look_messages import receive, send
from nbdist.serving.visitor_code import PrintedTexts, VisitorNames, run_code

NEVER = sys.maxsize  # no step
_ALONE = 2.0  # seconds that code may still run when its visitor is gone
_TURNS = 100  # of a loop: an exception that another thread has raised here comes at the next one
_STOPPED = "stopped, as its time was over or its visitor has gone"


class _Why(enum.Enum):
    """Why it stands still no longer."""

    ASKED = enum.auto()
    MOVED = enum.auto()  # to a later step
    LIMIT = enum.auto()


class _CodeStopped(BaseException):
    """Code of a visitor has to end: the visitor is gone, or the time is over. Raised at its next line of Python."""


class StepPause:
    """Stands still when it is to.

    Attributes:
        target: The step after which to stand still.
        allowed: Whether anybody may have it stand still.

    Args:
        pace: Returns the steps so far, and the seconds of one.
    """

    def __init__(self, pace: Callable[[], tuple[int, float]]) -> None:
        self.allowed = False
        self._pace = pace
        self._visitor: _Visitor | None = None
        self.forget()

    def forget(self) -> None:
        """Stand still for nobody: in a forked child, where no other thread is left, and the lock may be taken."""
        if self._visitor is not None:
            self._visitor.connection.close()
        self.target = NEVER
        self._lock = threading.Lock()
        self._visitor = None
        self._standing_for: _Visitor | None = None
        self._runner = 0  # the thread that runs a visitor's code

    @property
    def standing(self) -> bool:
        """Whether it stands still."""
        return self._standing_for is not None

    def attend(self, connection: socket.socket, request: TakeControl) -> None:
        """Do what a visitor wants, until the connection ends. Takes a thread of its own, and closes the connection."""
        visitor = _Visitor(connection, request)
        with self._lock:
            refused = self._refusal()
            if refused is None:
                self._visitor = visitor
        visitor.say(refused or Controlled(*self._pace()))
        try:
            while refused is None:
                self._follow(visitor, receive(connection, Order))
        except (OSError, msgspec.MsgspecError):
            pass  # it is gone, or might as well be
        finally:
            self._let_go(visitor)
            visitor.leave()

    def reached(self, steps: int, frame: FrameType) -> bool:
        """Stand still if this is the step for it: called after each one from `target` on, by the thread that steps.

        Args:
            steps: How many there have been.
            frame: Where the thread is.

        Returns:
            Whether it has stood still.

        Raises:
            StaleGroupError: What the visitor's code has called would mix with the training's collectives.
        """
        with self._lock:
            visitor = self._visitor
            if visitor is None or self.target != steps:
                return False
            self._standing_for = visitor
            visitor.todo = queue.SimpleQueue()
        began, why = time.monotonic(), _Why.ASKED
        visitor.say(StandsStill(steps, entered_collectives()))
        try:
            limit = self._stop_code_in(visitor.left, visitor)
        except RuntimeError:  # no thread can be started, so nobody would end its code
            self._leave(visitor, 0.0, why)
            return False
        try:
            why = self._stand(visitor, frame, began + visitor.left)
        finally:
            limit.cancel()
            self._leave(visitor, time.monotonic() - began, why)
        return True

    def _refusal(self) -> ControlRefused | None:
        if not self.allowed:
            return ControlRefused("forbidden")
        return ControlRefused("taken", self._visitor.pid) if self._visitor is not None else None

    def _follow(self, visitor: _Visitor, order: Order) -> None:
        with self._lock:
            if self._visitor is not visitor:  # its time is over
                return
            if isinstance(order, PauseAfter):
                self._aim(visitor, order)
            elif self._standing_for is visitor:
                visitor.todo.put(order)
            elif isinstance(order, GoOn):
                self.target = NEVER
                self._visitor = None
                visitor.say(WentOn(visitor.stood, False))

    def _aim(self, visitor: _Visitor, order: PauseAfter) -> None:
        # First the target: a step that is made meanwhile is either in the number that is read next, or meets it.
        self.target = order.step
        steps, _ = self._pace()
        if steps >= order.step:
            self.target = NEVER
            visitor.say(StepPassed(order.step, steps))
        if self._standing_for is visitor:
            visitor.todo.put(order)

    def _stand(self, visitor: _Visitor, frame: FrameType, end: float) -> _Why:
        names: VisitorNames | None = None
        try:
            while True:
                try:
                    order = visitor.todo.get(timeout=max(0.0, end - time.monotonic()))
                except queue.Empty:
                    return _Why.LIMIT
                if isinstance(order, BreakOff):
                    raise StaleGroupError(order.why)
                if not isinstance(order, RunCode):
                    return _Why.MOVED if isinstance(order, PauseAfter) else _Why.ASKED
                names = names or VisitorNames(frame)
                visitor.say(self._run(visitor, order.code, names))
        finally:
            if names is not None:
                names.forget_frame()

    def _run(self, visitor: _Visitor, code: str, names: VisitorNames) -> CodeRan:
        """Run code. `_CodeStopped`, which comes once or not at all, must not meet the training."""
        printed = PrintedTexts()
        failure: CodeFailure | None = CodeFailure("", _STOPPED, f"{_STOPPED}\n")
        try:
            with self._lock:
                if self._visitor is not visitor:
                    return CodeRan([], failure)
                self._runner = threading.get_ident()
            try:
                found = run_code(code, names, printed)
            finally:
                with self._lock:
                    self._runner = 0
                for _ in range(_TURNS):  # to take it back would leave Python 3.11 hanging in the next traced call
                    pass
            failure = found
        except _CodeStopped:
            pass
        return CodeRan(printed.texts, failure)

    def _stop_code_in(self, seconds: float, visitor: _Visitor) -> threading.Timer:
        """End a visitor's code if it still runs then."""
        timer = threading.Timer(seconds, self._stop_code, (visitor,))
        timer.daemon = True
        timer.start()
        return timer

    def _stop_code(self, visitor: _Visitor) -> None:
        with self._lock:
            if self._runner and self._standing_for is visitor:
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(self._runner), ctypes.py_object(_CodeStopped))
                self._runner = 0

    def _leave(self, visitor: _Visitor, seconds: float, why: _Why) -> None:
        with self._lock:
            self._standing_for = None
            visitor.left -= seconds
            visitor.stood += seconds
            if why is _Why.MOVED or self._visitor is not visitor:
                return
            self.target = NEVER
            self._visitor = None
        visitor.say(WentOn(visitor.stood, why is _Why.LIMIT))

    def _let_go(self, visitor: _Visitor) -> None:
        with self._lock:
            if self._visitor is not visitor:
                return
            self._visitor = None
            self.target = NEVER
            visitor.todo.put(GoOn())
            runs = self._runner != 0
        if runs:  # it may be about to meet the other ranks in a collective, which it would leave alone there
            self._stop_code_in(_ALONE, visitor)


class _Visitor:
    """Who has a process stand still.

    Attributes:
        connection: To it.
        pid: Its process.
        left: Seconds that the process may still stand still.
        stood: Seconds that it has.
        todo: What it wants while the process stands still.
    """

    def __init__(self, connection: socket.socket, request: TakeControl) -> None:
        self.connection = connection
        self.pid = request.by
        self.left = min(request.limit, LONGEST) if request.limit > 0 else 0.0  # more, and a wait would raise an error
        self.stood = 0.0
        self.todo: queue.SimpleQueue[Order] = queue.SimpleQueue()
        self._said: queue.SimpleQueue[Report | None] = queue.SimpleQueue()
        threading.Thread(target=self._write, name="nbdist-serve-answers", daemon=True).start()

    def say(self, report: Report) -> None:
        """Send something. Never waits: who trains must not, and the visitor may be stopped."""
        self._said.put(report)

    def leave(self) -> None:
        """Send what there is, and close the connection."""
        self._said.put(None)

    def _write(self) -> None:
        with self.connection, contextlib.suppress(OSError):
            while (report := self._said.get()) is not None:
                send(self.connection, report)
