"""Reads the ranks' stdout and stderr pipes, finds the marks in them, and holds back what the notebook can't take yet.

Pure except for `os.read`: what is read comes out as Output messages.
"""

from __future__ import annotations

import os
import re
import select
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from nbdist.agent.live_region import LiveOutput
from nbdist.wire.messages.output import END, OUTPUT_WINDOW, STDERR, Output

_READ = 1 << 17
COALESCE = 0.05  # seconds between messages of a stream that keeps printing
_HOLD = 1.0  # seconds for which lines are held that may be drawn again
LINE_END = 0.005  # seconds that the start of a line waits for its end: print writes them one after the other
_STDERR_TAIL = 1 << 14
_MARK_LENGTH = 128  # maximum length of a mark in bytes
_MARK = re.compile(rb"(\d{1,18});(-?\d{1,18})")  # after its token
_PIPE_SIZE = 1 << 20  # maximum bytes in a pipe


@dataclass
class _Pipe:
    descriptor: int
    rank: int
    stream: int
    rest: bytes = b""  # read but not sent yet
    free: float = 0.0  # when the next message may be sent
    due: float = 0.0  # when `rest` is sent
    held_until: float | None = None  # when lines come out that `live` holds
    open: bool = True
    live: LiveOutput = field(default_factory=LiveOutput)


@dataclass
class _Account:
    unpaid: int = 0
    held: bool = False
    pipes: list[_Pipe] = field(default_factory=list)


class PipeReader:
    """All pipes of one set of ranks.

    Args:
        token: The bytes that every mark starts with.
    """

    def __init__(self, token: bytes) -> None:
        self._token = token
        self._epoll = select.epoll()
        self._pipes: dict[int, _Pipe] = {}
        self._accounts: dict[int, _Account] = {}
        self._tails: dict[int, bytes] = {}
        self._waiting: dict[int, _Pipe] = {}

    def fileno(self) -> int:
        return self._epoll.fileno()

    def add(self, rank: int, stream: int, descriptor: int) -> None:
        """Read from this descriptor (and own it) from now on."""
        os.set_blocking(descriptor, False)
        self._tails.pop(rank, None)
        pipe = _Pipe(descriptor, rank, stream)
        self._pipes[descriptor] = pipe
        self._accounts.setdefault(rank, _Account()).pipes.append(pipe)
        self._epoll.register(descriptor, select.EPOLLIN)

    def read(self) -> Iterator[Output]:
        """Yield what can be read and sent now."""
        for descriptor, _ in self._epoll.poll(0):
            yield from self._read_pipe(self._pipes[descriptor])
        yield from self._send_due()

    def due(self) -> float | None:
        """Return the seconds until `read` has something to send even if nothing is printed; None if nothing waits."""
        dues = [pipe.due for pipe in self._waiting.values()]
        dues += [pipe.held_until for pipe in self._pipes.values() if pipe.held_until is not None]
        return max(0.0, min(dues) - time.monotonic()) if dues else None

    def credit(self, rank: int, size: int) -> None:
        """Note that the notebook has taken `size` bytes from this rank."""
        account = self._accounts.get(rank)
        if account is None:
            return
        account.unpaid -= size
        if account.held and account.unpaid < OUTPUT_WINDOW:
            account.held = False
            for pipe in account.pipes:
                if pipe.open:
                    self._epoll.modify(pipe.descriptor, select.EPOLLIN)

    def drain(self, rank: int) -> Iterator[Output]:
        """Yield everything that a finished rank left in its pipes, then close them."""
        account = self._accounts.pop(rank, _Account())
        for pipe in account.pipes:
            size = 0  # bounded: a process that left the rank's group may still print
            while size < _PIPE_SIZE and pipe.open and (data := _read(pipe.descriptor)):
                size += len(data)
                yield from self._take(pipe, data)
            yield from self._finish(pipe)

    def stderr_tail(self, rank: int) -> str:
        """Return the last lines that the rank wrote to stderr since its last cell ended, without marks."""
        return self._tails.get(rank, b"").decode(errors="replace")

    def close(self) -> None:
        for pipe in list(self._pipes.values()):
            self._close(pipe)
        self._epoll.close()

    def _read_pipe(self, pipe: _Pipe) -> Iterator[Output]:
        data = _read(pipe.descriptor)
        if data is None:
            return
        if not data:
            yield from self._finish(pipe)
            return
        yield from self._take(pipe, data)

    def _finish(self, pipe: _Pipe) -> Iterator[Output]:
        """Yield what is left of a pipe that has ended, once."""
        rest, pipe.rest = pipe.rest, b""
        if rest or pipe.live.is_drawing:
            yield self._message(pipe, rest, None, ends=True)
        self._close(pipe)

    def _take(self, pipe: _Pipe, data: bytes) -> Iterator[Output]:
        seen = max(0, len(pipe.rest) - _MARK_LENGTH)
        rest = pipe.rest + data if pipe.rest else data
        while (start := rest.find(self._token, seen)) >= 0 and (end := rest.find(b"\a", start)) >= 0:
            found = _MARK.fullmatch(rest, start + len(self._token), end)
            if found is None:  # torn, or printed by a rank that read part of it: ordinary text
                seen = start + 1
                continue
            serial, sequence = map(int, found.groups())
            if sequence <= END:
                yield from self._sweep_stderr(pipe.rank)
                self._tails.pop(pipe.rank, None)
            yield self._message(pipe, rest[:start], (serial, sequence), ends=sequence <= END)
            rest = rest[end + 1 :]
            pipe.free = seen = 0  # what follows starts a new burst
        pipe.rest = rest
        if self._whole(rest) == 0:
            self._waiting.pop(pipe.descriptor, None)
            return
        now = time.monotonic()
        if rest.endswith(b"\n") and not pipe.live.may_go_on_below(rest):
            pipe.due = pipe.free
        elif pipe.descriptor not in self._waiting:
            pipe.due = max(pipe.free, now + LINE_END)
        if now >= pipe.due or len(rest) >= _READ:
            yield self._send(pipe, now)
        else:
            self._waiting[pipe.descriptor] = pipe

    def _sweep_stderr(self, rank: int) -> Iterator[Output]:
        """Yield all of a rank's stderr: what precedes a mark on stdout is in the pipe when the mark is read."""
        account = self._accounts.get(rank, _Account())
        for pipe in (pipe for pipe in account.pipes if pipe.stream == STDERR and pipe.open):
            size = 0  # bounded: a thread or child of the rank may keep printing
            while size < _PIPE_SIZE and (data := _read(pipe.descriptor)):
                size += len(data)
                yield from self._take(pipe, data)
            if pipe.rest or pipe.live.is_drawing:
                self._waiting.pop(pipe.descriptor, None)
                data, pipe.rest, pipe.free = pipe.rest, b"", 0.0
                yield self._message(pipe, data, None, ends=True)

    def _send_due(self) -> Iterator[Output]:
        now = time.monotonic()
        for pipe in list(self._waiting.values()):
            if now >= pipe.due:
                yield self._send(pipe, now)
        for pipe in self._pipes.values():
            if pipe.held_until is not None and now >= pipe.held_until:
                yield self._output(pipe, pipe.live.release(), None)

    def _send(self, pipe: _Pipe, now: float) -> Output:
        """Return what was read, except an incomplete mark, or the start of a line after complete ones.

        The end of that line may arrive in a moment, and would otherwise wait for the next message.
        """
        self._waiting.pop(pipe.descriptor, None)
        pipe.free = now + COALESCE
        size = self._whole(pipe.rest)
        lines = pipe.rest.rfind(b"\n", 0, size) + 1
        if 0 < lines < size and not pipe.live.is_drawn_by(pipe.rest[lines:size]):
            size, pipe.due = lines, pipe.free
            self._waiting[pipe.descriptor] = pipe
        data, pipe.rest = pipe.rest[:size], pipe.rest[size:]
        return self._message(pipe, data, None)

    def _whole(self, data: bytes) -> int:
        """Return how many of these bytes are certainly not the start of a mark that is cut in two."""
        start = data.find(b"\x1b", max(0, len(data) - _MARK_LENGTH))
        while start >= 0:
            if self._token.startswith(data[start : start + len(self._token)]) or data.startswith(self._token, start):
                return start
            start = data.find(b"\x1b", start + 1)
        return len(data)

    def _message(self, pipe: _Pipe, data: bytes, mark: tuple[int, int] | None, *, ends: bool = False) -> Output:
        data = pipe.live.feed(data)
        if ends:
            data += pipe.live.end()
        return self._output(pipe, data, mark)

    def _output(self, pipe: _Pipe, data: bytes, mark: tuple[int, int] | None) -> Output:
        """Return what goes to the notebook, and note it."""
        if not pipe.live.holds_lines:
            pipe.held_until = None
        elif pipe.held_until is None:
            pipe.held_until = time.monotonic() + _HOLD
        if pipe.stream == STDERR and data:
            self._tails[pipe.rank] = (self._tails.get(pipe.rank, b"") + data)[-_STDERR_TAIL:]
        account = self._accounts.get(pipe.rank)
        if account is not None:
            account.unpaid += len(data)
            if account.unpaid >= OUTPUT_WINDOW and not account.held:
                self._hold(account)
        return Output(pipe.rank, pipe.stream, data, mark)

    def _hold(self, account: _Account) -> None:
        account.held = True
        for pipe in account.pipes:
            if pipe.open:
                self._epoll.modify(pipe.descriptor, 0)

    def _close(self, pipe: _Pipe) -> None:
        if not pipe.open:
            return
        pipe.open = False
        self._waiting.pop(pipe.descriptor, None)
        self._pipes.pop(pipe.descriptor, None)
        self._epoll.unregister(pipe.descriptor)
        os.close(pipe.descriptor)


def _read(descriptor: int) -> bytes | None:
    """Return what can be read: b"" at the end, None if there is nothing yet."""
    try:
        return os.read(descriptor, _READ)
    except BlockingIOError:
        return None
