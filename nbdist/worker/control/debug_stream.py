"""A connection to this rank's debugpy for a notebook on another machine.

Two threads of its own: the control thread never waits for debugpy. Independent of the protocol.
"""

from __future__ import annotations

import contextlib
import functools
import queue
import socket
import threading
from collections.abc import Callable

from nbdist.wire.questions.debug_bytes import DebugBytes, OpenDebugger, TellDebugger
from nbdist.wire.questions.question import Done
from nbdist.worker.cell import debug_server

_CONNECT = 10.0  # seconds
_AT_ONCE = 64 << 10  # bytes


class DebugStream:
    """The connection that was asked for last. Its methods are called in the control thread.

    Args:
        say: Called from other threads with a request's number and an answer to it.
    """

    def __init__(self, say: Callable[[int, DebugBytes], None]) -> None:
        self._say = say
        self._unsent: queue.SimpleQueue[bytes] = queue.SimpleQueue()

    def open(self, request: int, question: OpenDebugger) -> None:
        """Connect, and answer this request with what comes."""
        self._unsent.put(b"")
        self._unsent = queue.SimpleQueue()
        _start(functools.partial(self._write, request, question.port, self._unsent))

    def tell(self, question: TellDebugger) -> Done:
        """Send to debugpy, or end the connection."""
        self._unsent.put(question.data)
        return Done()

    def _write(self, request: int, port: int, unsent: queue.SimpleQueue[bytes]) -> None:
        try:
            connection = socket.create_connection(("127.0.0.1", port), _CONNECT)
        except OSError:
            self._say(request, DebugBytes(b""))
            return
        connection.settimeout(None)
        _start(functools.partial(self._read, request, connection))
        with contextlib.suppress(OSError):
            while data := unsent.get():
                connection.sendall(data)
            connection.shutdown(socket.SHUT_RDWR)

    def _read(self, request: int, connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):
            while data := connection.recv(_AT_ONCE):
                self._say(request, DebugBytes(data))
        self._say(request, DebugBytes(b""))


def _start(work: Callable[[], None]) -> None:
    thread = threading.Thread(target=work, name="nbdist-debugger", daemon=True)
    debug_server.exempt(thread)
    thread.start()
