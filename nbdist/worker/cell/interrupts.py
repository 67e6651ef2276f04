"""Who may be interrupted when: KeyboardInterrupt reaches exactly the cell that was meant, or nobody.

Knows the main thread's signals; independent of the wire.
"""

from __future__ import annotations

import _thread
import ast
import asyncio
import contextlib
import linecache
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from types import FrameType
from typing import Any

from nbdist.base import limits
from nbdist.worker.cell.programs import Programs, waits_in_system

_RESEND_UNRAISABLE = 0.02
_INTERRUPTS = {signal.SIGINT}
_NOT_THE_USERS = {"IPython", "asyncio", "contextlib", "nbdist", "torch"}


def _never() -> bool:
    return False


class StepStop(KeyboardInterrupt):
    """The cell was stopped between two steps: models, optimizers and groups are whole. Run the cell again to go on."""


class InterruptGate:
    """Raises KeyboardInterrupt on the main thread, only while the cell that it was asked for is running.

    Args:
        wake: Called from any thread when `resend_due` has changed.
    """

    def __init__(self, wake: Callable[[], None]) -> None:
        self._held = _never
        self._wake = wake
        self._insist = False  # it has been held back for long enough
        self._main = threading.main_thread().ident or 0
        self._pid = os.getpid()
        self._wanted = 0
        self._asked = 0
        self._running = 0
        self._once = False
        self._given = 0  # the cell that was interrupted last
        self._settled = 0  # the one that has a clause of its own for that
        self._due: float | None = None
        self._programs = Programs()
        self._ignored = sys.unraisablehook
        sys.unraisablehook = self._unraisable

    @property
    def running(self) -> int:
        """The serial number of the cell that runs, 0 for none."""
        return self._running

    @property
    def asked(self) -> bool:
        """Whether the running cell has been asked to stop."""
        return self._running != 0 and self.was_asked(self._running)

    def was_asked(self, serial: int) -> bool:
        """Return whether a cell has been asked to stop."""
        return self._asked == serial

    def was_given(self, serial: int) -> bool:
        """Return whether the interrupt has reached the code of a cell."""
        return self._given == serial

    def is_settled(self, serial: int) -> bool:
        """Return whether an `except KeyboardInterrupt` of a cell has been given the interrupt: it needs no other."""
        return self._settled == serial

    def give(self, frame: FrameType | None) -> None:
        """Note that the running cell is about to be interrupted in this frame. On the main thread."""
        self._given = self._running
        if catches_interrupts(frame):
            self._settled, self._due = self._running, None

    @contextlib.contextmanager
    def open(self, serial: int, *, once: bool = False, held: Callable[[], bool] = _never) -> Iterator[None]:
        """Let requests for this serial number raise KeyboardInterrupt while the body runs.

        Args:
            serial: What runs.
            once: Whether a request is met when it has been raised; else it is raised again until the body ends, unless
                that has a clause for it.
            held: Whether the main thread must not be interrupted right now: an optimizer's step is applied whole.
                Whoever holds looks at `pending` in the end.
        """
        # A cell may have set a handler of its own, or blocked the signal: that holds until its end.
        if signal.getsignal(signal.SIGINT) != self._handle:
            signal.signal(signal.SIGINT, self._handle)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _INTERRUPTS)
        self._programs.begin()
        self._held = held
        self._running, self._once = serial, once
        try:
            if self._asked == serial:  # asked before the cell came
                raise KeyboardInterrupt
            yield
        finally:
            self._running = 0
            self._due = None
            self._held = _never

    @contextlib.contextmanager
    def undisturbed(self) -> Iterator[None]:
        """Hold interrupts back in the body, until they are sent again."""
        held, self._held = self._held, lambda: True
        try:
            yield
        finally:
            self._held = held

    def request(self, serial: int, *, again: bool = False) -> None:
        """Interrupt the cell `serial`, now or when it starts, and its programs. From any thread.

        Args:
            serial: The cell.
            again: Whether also programs that have been interrupted.
        """
        self._asked = serial
        self._settled = 0
        self._insist = False
        # The cell comes first, else it would see programs fail; those that a `finally` of it then starts are not meant.
        programs = self._programs.to_interrupt(again=again) if self._running == serial else []
        self._send()
        self._programs.interrupt(programs)

    def resend(self) -> bool:
        """Send the interrupt again if the cell has swallowed it. From the control thread. Returns whether it did."""
        if self._due is None or time.monotonic() < self._due:
            return False
        self._insist = True
        if self.pending and not self.was_given(self._running):  # a program that has begun since may be in its way
            self._programs.interrupt(self._programs.to_interrupt(again=False))
        self._send()
        return True

    def resend_due(self) -> float | None:
        """Return the seconds until `resend` should be called, or None."""
        due = self._due
        return None if due is None else max(0.0, due - time.monotonic())

    @property
    def pending(self) -> bool:
        """Whether the running cell is yet to be interrupted."""
        return self._running != 0 and self._wanted == self._running

    def _send(self) -> None:
        self._wanted = self._asked
        if self._running != self._asked:
            self._due = None
            return
        self._due = time.monotonic() + limits.RESEND
        self._wake()
        if waits_in_system():
            _thread.interrupt_main(signal.SIGINT)  # as soon as Python goes on
        else:
            signal.pthread_kill(self._main, signal.SIGINT)

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        if self._running and self._wanted == self._running and os.getpid() == self._pid:
            if self._held() and not self._insist:
                return
            self._wanted = 0
            if self._insist and isinstance(sys.exc_info()[1], KeyboardInterrupt):
                return  # a clause that it has begun is under way: it is sent again later
            self.give(frame)
            if self._once:
                self._due = None
            raise KeyboardInterrupt

    def _unraisable(self, args: Any) -> None:
        if args.exc_type is KeyboardInterrupt and self.asked:
            self._due = time.monotonic() + _RESEND_UNRAISABLE  # a finalizer swallowed it
            self._wake()
            return
        self._ignored(args)


def is_the_users(frame: FrameType) -> bool:
    """Return whether a frame is of the user's code, or of a library that may be used in place of it."""
    return str(frame.f_globals.get("__name__")).partition(".")[0] not in _NOT_THE_USERS


def catches_interrupts(frame: FrameType | None) -> bool:
    """Return whether an `except KeyboardInterrupt` of the user's surrounds the place where a frame is."""
    while frame is not None:
        if "KeyboardInterrupt" in frame.f_code.co_names and is_the_users(frame) and _catches_at(frame):
            return True
        frame = frame.f_back
    return False


def _catches_at(frame: FrameType) -> bool:
    try:
        program = ast.parse("".join(linecache.getlines(frame.f_code.co_filename, frame.f_globals)))
    except (SyntaxError, ValueError):
        return False
    return any(
        isinstance(node, ast.Try)
        and node.body[0].lineno <= frame.f_lineno <= (node.body[-1].end_lineno or 0)
        and any(_names_the_interrupt(handler) for handler in node.handlers)
        for node in ast.walk(program)
    )


def _names_the_interrupt(handler: ast.ExceptHandler) -> bool:
    named = ast.walk(handler.type) if handler.type is not None else ()
    return any(isinstance(node, ast.Name) and node.id == "KeyboardInterrupt" for node in named)


def cancel_alarm() -> bool:
    """Cancel what the cell has left of `signal.alarm` or `signal.setitimer`: it would stop another cell, or the rank.

    Returns:
        Whether there was any. One that a handler in C waits for is a profiler's, and stays.
    """
    if signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0) or signal.getsignal(signal.SIGALRM) is None:
        return False
    signal.setitimer(signal.ITIMER_REAL, 0.0)
    return True


class CellLoop:
    """The event loop in which cells await. A cell that closes or removes it leaves a loop to the next one."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()

    def provide(self) -> None:
        """Make it the current one."""
        if self._loop.is_closed():
            self._loop = asyncio.new_event_loop()
        asyncio.set_event_loop(self._loop)  # `asyncio.run` leaves none

    def run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        """Run a cell's coroutine. When interrupted, cancel it: else it would go on inside the next cell that awaits."""
        self.provide()
        task = self._loop.create_task(coroutine)
        try:
            return self._loop.run_until_complete(task)
        except BaseException:  # an interrupt above all
            if not task.done():
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError, Exception):
                    self._loop.run_until_complete(asyncio.wait([task], timeout=1))
            raise
