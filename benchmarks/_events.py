"""When processes wake up and send: each notes it in a file of its own, which others may read meanwhile.

Knows sockets and pipes, nothing of what they carry.
"""

from __future__ import annotations

import mmap
import os
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import zmq

SIZE = 1 << 20
EVENT = struct.Struct("qq")  # nanoseconds and what
WAKES, SENDS, SENT = 1, 2, 3


class Events:
    """What this process notes from now on, and each that is forked from it.

    Args:
        folder: Where the files are.
    """

    def __init__(self, folder: str) -> None:
        self._folder = Path(folder)
        self._originals: list[tuple[Any, str, Any]] = []
        os.register_at_fork(after_in_child=self._open)
        self._open()
        self._around(zmq.Poller, "poll", after=WAKES)
        self._around(zmq.Socket, "recv", after=WAKES)
        self._around(zmq.Socket, "send", before=SENDS, after=SENT)
        self._around(os, "write", before=SENDS, after=SENT)

    def end(self) -> None:
        """Note nothing any more, in this process."""
        for owner, name, original in self._originals:
            setattr(owner, name, original)
        self._originals.clear()

    def _open(self) -> None:
        path = self._folder / str(os.getpid())
        path.write_bytes(bytes(SIZE))
        with path.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), SIZE)
        self._end = 0

    def _note(self, what: int) -> None:
        EVENT.pack_into(self._memory, self._end, time.monotonic_ns(), what)
        self._end = (self._end + EVENT.size) % SIZE  # the oldest are overwritten

    def _around(self, owner: Any, name: str, *, before: int = 0, after: int) -> None:
        original: Callable[..., Any] = getattr(owner, name)

        def call(*args: Any, **keywords: Any) -> Any:
            if before:
                self._note(before)
            result = original(*args, **keywords)
            self._note(after)
            return result

        self._originals.append((owner, name, original))
        setattr(owner, name, call)
