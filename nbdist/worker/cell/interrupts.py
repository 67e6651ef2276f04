"""Who may be interrupted when: KeyboardInterrupt reaches exactly the cell that was meant, or nobody.

Knows the main thread's signals; knows nothing of the wire.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

from nbdist import limits

_RESEND_UNRAISABLE = 0.02
_INTERRUPTS = {signal.SIGINT}


class StepStop(KeyboardInterrupt):
    """The cell was stopped between two steps: models, optimizers and groups are whole. Run the cell again to go on."""


class InterruptGate:
    """Raises KeyboardInterrupt on the main thread, only while the cell that it was asked for is running.

    Args:
        wake: Called from any thread when `resend_due` has changed.

    Attributes:
        held: Whether the main thread must not be interrupted right now: an optimizer's step is applied whole. Whoever
            holds looks at `pending` in the end.
    """

    def __init__(self, wake: Callable[[], None]) -> None:
        self.held: Callable[[], bool] = lambda: False
        self._wake = wake
        self._insist = False  # it has been held back for long enough
        self._main = threading.main_thread().ident or 0
        self._pid = os.getpid()
        self._wanted = 0
        self._asked = 0
        self._running = 0
        self._once = False
        self._due: float | None = None
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

    @contextlib.contextmanager
    def open(self, serial: int, *, once: bool = False) -> Iterator[None]:
        """Let requests for this serial number raise KeyboardInterrupt while the body runs.

        Args:
            serial: What runs.
            once: Whether a request is met when it has been raised; else it is raised again until the body ends.
        """
        # A cell may have set a handler of its own, or blocked the signal: that holds until its end.
        if signal.getsignal(signal.SIGINT) != self._handle:
            signal.signal(signal.SIGINT, self._handle)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _INTERRUPTS)
        self._running, self._once = serial, once
        try:
            if self._asked == serial:  # asked before the cell came
                raise KeyboardInterrupt
            yield
        finally:
            self._running = 0
            self._due = None

    @contextlib.contextmanager
    def undisturbed(self) -> Iterator[None]:
        """Hold interrupts back in the body, until they are sent again."""
        held, self.held = self.held, lambda: True
        try:
            yield
        finally:
            self.held = held

    def request(self, serial: int) -> None:
        """Interrupt the cell `serial`, now or when it starts. From any thread."""
        self._asked = serial
        self._insist = False
        self._send()

    def resend(self) -> None:
        """Send the interrupt again if the cell has swallowed it. From the control thread."""
        if self._due is not None and time.monotonic() >= self._due:
            self._insist = True
            self._send()

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
        signal.pthread_kill(self._main, signal.SIGINT)

    def _handle(self, signum: int, frame: object) -> None:
        if self._running and self._wanted == self._running and os.getpid() == self._pid:
            if self.held() and not self._insist:
                return
            self._wanted = 0
            if self._once:
                self._due = None
            raise KeyboardInterrupt

    def _unraisable(self, args: Any) -> None:
        if args.exc_type is KeyboardInterrupt and self.asked:
            self._due = time.monotonic() + _RESEND_UNRAISABLE  # a finalizer swallowed it
            self._wake()
            return
        self._ignored(args)


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
        except BaseException:
            if not task.done():
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError, Exception):
                    self._loop.run_until_complete(asyncio.wait([task], timeout=1))
            raise


def run_command(command: str) -> int:
    """Run a shell command with the rank's own stdout and stderr. An interrupt ends the command and then the cell.

    Returns:
        The exit code as subprocess has it.
    """
    process = subprocess.Popen(
        command, shell=True, executable=os.environ.get("SHELL") or None, stdin=subprocess.DEVNULL
    )
    try:
        return process.wait()
    except BaseException:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(1)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        raise
