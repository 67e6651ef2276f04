"""A rank's stdout and stderr: straight into the pipes that the agent reads.

Every write is in the pipe when it returns. So print, C code and child processes share one order, a killed rank's last
line is not lost, and nothing waits in a buffer that a forked DataLoader worker would print again.
"""

from __future__ import annotations

import builtins
import contextlib
import ctypes
import fcntl
import functools
import io
import os
import select
import sys
import threading
import traceback
from typing import Any

from nbdist.wire.messages.output import STDERR, STDOUT

_libc = ctypes.CDLL(None)
_LINE_BUFFERED = 1  # _IOLBF of <stdio.h> on Linux
_STREAMS = {STDOUT: "stdout", STDERR: "stderr"}
_C_STREAMS = {each: ctypes.c_void_p.in_dll(_libc, name) for each, name in _STREAMS.items()}  # C's own variables
_BUSY_LIMIT = 1.0  # seconds that another thread may be inside of a stream of C until it is left alone


def write_all(descriptor: int, data: Any) -> None:
    """Write all of it, also if a signal arrives halfway, or a program has made the pipe non-blocking."""
    written = _write(descriptor, data)
    if written < len(data):
        rest = memoryview(data).cast("B")[written:]
        while rest:
            rest = rest[_write(descriptor, rest) :]


def _write(descriptor: int, data: Any) -> int:
    try:
        return os.write(descriptor, data)
    except BlockingIOError:
        room = select.poll()
        room.register(descriptor, select.POLLOUT)
        room.poll()
        return 0


class PipeWriter(io.RawIOBase):
    """A descriptor that takes all of what is written."""

    def __init__(self, descriptor: int) -> None:
        super().__init__()
        self._descriptor = descriptor

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._descriptor

    def write(self, data: Any) -> int:
        write_all(self._descriptor, data)
        return len(data)


class RankStream(io.TextIOWrapper):
    """Writes each string straight into a pipe, in one piece."""

    def __init__(self, descriptor: int) -> None:
        super().__init__(
            PipeWriter(descriptor),  # type: ignore[arg-type]  # it keeps nothing back, so it serves as its own buffer
            encoding="utf-8",
            errors="backslashreplace",
            newline="",
            write_through=True,
        )


_print = builtins.print


@functools.wraps(_print)
def print_at_once(*values: Any, sep: Any = None, end: Any = None, file: Any = None, flush: bool = False) -> None:
    """Make `print` write once: else lines of threads and DataLoader workers would mix, at several writes each."""
    stream = sys.stdout if file is None else file
    if not isinstance(stream, RankStream) or not isinstance(sep or "", str) or not isinstance(end or "", str):
        _print(*values, sep=sep, end=end, file=file, flush=flush)
        return
    stream.write((" " if sep is None else sep).join(map(str, values)) + ("\n" if end is None else end))


def show_exception() -> None:
    """Print the exception that is being handled, if that can be done."""
    with contextlib.suppress(Exception):
        print_at_once(traceback.format_exc(), file=sys.__stderr__)


def redirect_python() -> None:
    """Point Python's stdout and stderr at the descriptors 1 and 2, and C's stdout at whole lines."""
    for descriptor, name in _STREAMS.items():
        stream = RankStream(descriptor)
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    builtins.print = print_at_once
    _libc.setvbuf(_C_STREAMS[STDOUT], None, _LINE_BUFFERED, 0)


def flush_c() -> None:
    """Write out what C code has left in the buffers of its stdout and stderr.

    Not in those of other streams: a thread that waits for input holds the lock of its own.
    """
    for stream in _C_STREAMS.values():
        if _libc.__fpending(stream):
            _flush(stream)


def _flush(stream: ctypes.c_void_p) -> None:
    """Flush a C stream, unless a thread that may never come back has its lock.

    In one call, in a thread: whoever held the stream's lock between two calls might wait for Python's, while a thread
    whose exception Python prints holds Python's and waits for the stream's.
    """
    flush = threading.Thread(target=_libc.fflush, args=(stream,), name="nbdist-flush", daemon=True)
    flush.start()
    flush.join(_BUSY_LIMIT)


class StandardStreams:
    """The descriptors 1 and 2 that this process begins with, and Python's streams on them.

    What a cell does to them holds until its end: else nothing that later cells print would be seen. Only another stream
    in place of `sys.stdout` stays, as in any notebook.
    """

    def __init__(self) -> None:
        self._copies = {each: fcntl.fcntl(each, fcntl.F_DUPFD_CLOEXEC, STDERR + 1) for each in _STREAMS}
        self._files = {each: _file(each) for each in _STREAMS}

    def restore(self) -> list[str]:
        """Put back what has been closed or redirected.

        Returns:
            What was put back, in words; usually nothing.
        """
        changed = []
        for descriptor, name in _STREAMS.items():
            if _file(descriptor) != self._files[descriptor]:
                os.dup2(self._copies[descriptor], descriptor)
                changed.append(f"file descriptor {descriptor} ({name})")
            if not os.get_blocking(descriptor):  # C code would lose what does not fit into the pipe
                os.set_blocking(descriptor, True)
            if not _takes_text(getattr(sys, f"__{name}__", None)):
                setattr(sys, f"__{name}__", RankStream(descriptor))
            if not _takes_text(getattr(sys, name, None)):
                setattr(sys, name, getattr(sys, f"__{name}__"))
                changed.append(f"sys.{name}")
        return changed


def _file(descriptor: int) -> tuple[int, int] | None:
    """Return what a descriptor refers to; None if it is closed."""
    try:
        found = os.fstat(descriptor)
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _takes_text(stream: Any) -> bool:
    """Return whether something in the place of `sys.stdout` can be printed to."""
    try:
        return callable(stream.write) and not getattr(stream, "closed", False)
    except Exception:  # what a user puts there may do anything when it is asked
        return False
