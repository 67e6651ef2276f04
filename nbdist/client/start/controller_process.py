"""A controller's process, from the client's side: one that this client starts, or one that another has started."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess

from nbdist.base.processes import describe_exit, python_command
from nbdist.wire.processes.setup import ControllerSetup, encode_line

_released: list[subprocess.Popen[bytes]] = []  # those that go on without us, until they have ended


class OwnController:
    """A controller that this process starts.

    Args:
        setup: What it is given.
        patient: Whether nothing waits for it yet; its template then yields the cores to others.
    """

    def __init__(self, setup: ControllerSetup, patient: bool) -> None:
        _released[:] = [process for process in _released if process.poll() is None]
        self._process = subprocess.Popen(
            python_command("nbdist.controller.controller_boot", "patient" if patient else "urgent"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd="/",
            start_new_session=True,
        )
        self.pid = self._process.pid
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # `first_line` will be empty
            self._process.stdin.write(encode_line(setup))
            self._process.stdin.close()

    @property
    def alive(self) -> bool:
        """Whether it runs."""
        return self._process.poll() is None

    def says(self, seconds: float) -> bool:
        """Return whether its first line has come, or its end, within some seconds."""
        assert self._process.stdout is not None
        waiting = select.poll()
        waiting.register(self._process.stdout, select.POLLIN)
        return bool(waiting.poll(seconds * 1000))

    def first_line(self) -> bytes:
        """Return its first line; empty if it has ended."""
        assert self._process.stdout is not None
        return self._process.stdout.readline()

    def describe_end(self) -> str:
        """Wait for its end, and return how it came about."""
        return describe_exit(self._process.wait())

    def release(self) -> None:
        """Let it go on without this process, which is its parent all the same."""
        _released.append(self._process)

    def terminate(self) -> None:
        """Ask it to end."""
        self._process.terminate()

    def end(self, limit: float) -> None:
        """Wait until it has ended; after some seconds end it."""
        try:
            self._process.wait(limit)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()


class FoundController:
    """A controller that another process has started.

    Args:
        pid: Its process.

    Raises:
        OSError: It has ended.
    """

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._end = os.pidfd_open(pid)

    @property
    def alive(self) -> bool:
        """Whether it runs."""
        return not self._ended(0.0)

    def describe_end(self) -> str:
        """Wait for its end; how it came about only its parent learns."""
        self._ended(None)
        return "another process started it, so how is not known"

    def release(self) -> None:
        """Let it go on without this process."""

    def terminate(self) -> None:
        """Ask it to end."""
        self._signal(signal.SIGTERM)

    def end(self, limit: float) -> None:
        """Wait until it has ended; after some seconds end it."""
        if not self._ended(limit):
            self._signal(signal.SIGKILL)
            self._ended(None)

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._end, number)

    def _ended(self, limit: float | None) -> bool:
        waiting = select.poll()
        waiting.register(self._end, select.POLLIN)
        return bool(waiting.poll(None if limit is None else limit * 1000))

    def __del__(self) -> None:
        if hasattr(self, "_end"):
            os.close(self._end)
