"""How the notebook reaches debugpy on a rank: on loopback, or on another machine through the session's connection."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Protocol, TypeAlias

from nbdist.client.base.answers import AnswerStream, AnswerStreams
from nbdist.wire.questions.debug_bytes import DebugBytes, OpenDebugger, TellDebugger
from nbdist.wire.questions.question import AnswerBody

_CONNECT = 10.0  # seconds


class Writer(Protocol):
    """The end of a line that takes bytes."""

    def write(self, data: bytes) -> None:
        """Send."""

    def close(self) -> None:
        """End the line."""


Line: TypeAlias = "tuple[asyncio.StreamReader, Writer]"
Dial: TypeAlias = Callable[[], Awaitable[Line]]


async def dial_here(port: int) -> Line:
    """Connect to a port on loopback.

    Raises:
        OSError: Nobody listens there.
    """
    return await asyncio.wait_for(asyncio.open_connection("127.0.0.1", port), _CONNECT)


async def dial_elsewhere(streams: AnswerStreams, rank: int, port: int) -> Line:
    """Connect to a port on loopback of a rank's own machine. The line ends at once if nobody listens there."""
    loop, reader = asyncio.get_running_loop(), asyncio.StreamReader()

    def take(answer: AnswerBody) -> None:
        with contextlib.suppress(RuntimeError):  # the kernel ends
            loop.call_soon_threadsafe(feed, answer)

    def feed(answer: AnswerBody) -> None:
        if isinstance(answer, DebugBytes) and answer.data:
            reader.feed_data(answer.data)
        elif not reader.at_eof():
            reader.feed_eof()

    return reader, _Elsewhere(streams.open(rank, OpenDebugger(port), take))


class _Elsewhere:
    def __init__(self, stream: AnswerStream) -> None:
        self._stream = stream
        self._closed = False

    def write(self, data: bytes) -> None:
        if not self._closed:
            self._stream.tell(TellDebugger(data))

    def close(self) -> None:
        self.write(b"")
        self._closed = True
