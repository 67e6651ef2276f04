"""The processes that start other nodes for us (`nbdist.cluster.starter`): one for each batch of nodes that is missing.

Owns their pipes. Independent of what they report.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import select
import subprocess
import time
from collections.abc import Iterator

import msgspec

from nbdist.base.processes import describe_exit, python_command
from nbdist.wire.processes.starter_lines import Report, StarterFailed, StarterSetup, decode_report

_END_LIMIT = 2.0  # seconds; it ends by itself, also without us


class NodeStarters:
    """The starters of a session. `fileno` is ready when one has reported."""

    def __init__(self) -> None:
        self._ready = select.epoll()
        self._processes: dict[int, subprocess.Popen[bytes]] = {}  # by descriptor of their reports
        self._rests: dict[int, bytes] = {}  # the beginning of a report
        self._numbers: dict[int, int] = {}
        self._count = itertools.count(1)
        self._ending: list[subprocess.Popen[bytes]] = []

    def fileno(self) -> int:
        """Return what to poll before `received`."""
        return self._ready.fileno()

    def begin(self, setup: StarterSetup) -> int:
        """Have nodes started. Returns the number of what starts them."""
        process = subprocess.Popen(
            python_command("nbdist.cluster.starter"), stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd="/"
        )
        assert process.stdin is not None and process.stdout is not None
        with contextlib.suppress(BrokenPipeError):  # its end is about to be noticed
            process.stdin.write(msgspec.json.encode(setup) + b"\n")
            process.stdin.flush()
        descriptor = process.stdout.fileno()
        os.set_blocking(descriptor, False)
        self._processes[descriptor], self._rests[descriptor] = process, b""
        self._numbers[descriptor] = next(self._count)
        self._ready.register(descriptor, select.EPOLLIN)
        return self._numbers[descriptor]

    def received(self) -> Iterator[tuple[int, Report]]:
        """Yield what has been reported, and by which."""
        for descriptor, _ in self._ready.poll(0):
            number, found = self._numbers[descriptor], os.read(descriptor, 1 << 16)
            *lines, self._rests[descriptor] = (self._rests[descriptor] + found).split(b"\n")
            yield from ((number, decode_report(line)) for line in lines)
            if not found:
                yield from ((number, report) for report in self._has_ended(descriptor))

    def _has_ended(self, descriptor: int) -> Iterator[Report]:
        process = self._forget(descriptor)
        if code := process.wait():
            yield StarterFailed(f"the process that starts nodes (pid {process.pid}) has ended: {describe_exit(code)}")

    def _forget(self, descriptor: int) -> subprocess.Popen[bytes]:
        self._ready.unregister(descriptor)
        del self._rests[descriptor], self._numbers[descriptor]
        process = self._processes.pop(descriptor)
        assert process.stdin is not None and process.stdout is not None
        process.stdout.close()
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()
        return process

    def end(self, number: int | None = None) -> None:
        """Have all nodes ended that were started, by one starter or all. Does not wait."""
        self._ending = [process for process in self._ending if process.poll() is None]
        chosen = [descriptor for descriptor, of in self._numbers.items() if number in (None, of)]
        self._ending += [self._forget(descriptor) for descriptor in chosen]

    def close(self) -> None:
        """End all, and wait for that, but not long."""
        self.end()
        deadline = time.monotonic() + _END_LIMIT
        for process in self._ending:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))

    def alive(self) -> list[int]:
        """Return the pids of starters that are still ending what they have started."""
        return [process.pid for process in (*self._processes.values(), *self._ending) if process.poll() is None]
