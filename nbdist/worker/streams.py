"""A rank's stdout and stderr: straight into the pipes that the agent reads.

Every write is in the pipe when it returns. So print, C code and child processes share one order, a killed rank's last
line is not lost, and nothing waits in a buffer that a forked DataLoader worker would print again.
"""

from __future__ import annotations

import builtins
import ctypes
import functools
import io
import os
import sys
from typing import Any

_libc = ctypes.CDLL(None)
_LINE_BUFFERED = 1  # _IOLBF of <stdio.h> on Linux


class PipeWriter(io.RawIOBase):
    """A descriptor that takes all of what is written, also when a signal arrives halfway."""

    def __init__(self, descriptor: int) -> None:
        super().__init__()
        self._descriptor = descriptor

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._descriptor

    def write(self, data: Any) -> int:
        size = len(data)
        written = os.write(self._descriptor, data)
        if written < size:
            self._write_rest(memoryview(data).cast("B")[written:])
        return size

    def _write_rest(self, rest: memoryview) -> None:
        while rest:
            rest = rest[os.write(self._descriptor, rest) :]


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
    """`print` with one write: else lines of threads and DataLoader workers would mix, and each would cost several."""
    stream = sys.stdout if file is None else file
    if not isinstance(stream, RankStream) or not isinstance(sep or "", str) or not isinstance(end or "", str):
        _print(*values, sep=sep, end=end, file=file, flush=flush)
        return
    stream.write((" " if sep is None else sep).join(map(str, values)) + ("\n" if end is None else end))


def redirect_python() -> None:
    """Point Python's stdout and stderr at the descriptors 1 and 2, and C's stdout at whole lines."""
    sys.stdout = sys.__stdout__ = RankStream(1)  # type: ignore[misc]
    sys.stderr = sys.__stderr__ = RankStream(2)  # type: ignore[misc]
    builtins.print = print_at_once
    _libc.setvbuf(ctypes.c_void_p.in_dll(_libc, "stdout"), None, _LINE_BUFFERED, 0)


def flush_c() -> None:
    """Write out what C code has left in its buffers."""
    _libc.fflush(None)
