"""Segments on their way between two machines: read here chunk by chunk, written there.

Both ends, for the controller and for agents. Independent of sockets, and of what the segments hold.
"""

from __future__ import annotations

import errno
import functools
import os
from collections.abc import Iterator, Sequence

from nbdist.wire import segments
from nbdist.wire.base.parcel import Segment
from nbdist.wire.frames import encode
from nbdist.wire.messages.chunks import CHUNK, WINDOW, Chunk

_KEPT = 2 * WINDOW // CHUNK  # chunks


class GivenSegments:
    """Segments of a process of this machine that other machines are to get.

    Args:
        key: Their name on the way.
        given: The segments.

    Raises:
        Unreachable: They are not there any more.
    """

    def __init__(self, key: int, given: Sequence[Segment]) -> None:
        self._key = key
        self._descriptors: list[int] = []
        self._read = functools.lru_cache(_KEPT)(self._encode)  # for machines that get it at about the same time
        try:
            for segment in given:
                self._descriptors.append(segments.open_segment(segment))
        except BaseException:  # an interrupt too would leave the others open
            self.close()
            raise
        self._sizes = [segment.size for segment in given]

    def chunks(self) -> Iterator[tuple[int, bytes]]:
        """Yield the size of each chunk, and its frame."""
        for number, size in enumerate(self._sizes):
            for offset in range(0, size, CHUNK):
                yield min(CHUNK, size - offset), self._read(number, offset)

    def _encode(self, number: int, offset: int) -> bytes:
        return encode(Chunk(self._key, number, offset, os.pread(self._descriptors[number], CHUNK, offset)))

    def close(self) -> None:
        """Let go of the segments."""
        self._read.cache_clear()
        while self._descriptors:
            os.close(self._descriptors.pop())


class Outgoing:
    """Segments on their way to one machine."""

    def __init__(self, source: GivenSegments) -> None:
        self._room = WINDOW
        self._chunks = source.chunks()

    def next_chunks(self, taken: int = 0) -> Iterator[bytes]:
        """Yield the frames that may be sent now.

        Args:
            taken: Bytes that the other side has taken since the last call.
        """
        self._room += taken
        while self._room > 0 and (chunk := next(self._chunks, None)) is not None:
            size, frame = chunk
            self._room -= size
            yield frame


class Incoming:
    """Segments that come from another machine.

    Args:
        sizes: Of each, in bytes.

    Raises:
        OSError: There is no memory for them.
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        self._sizes = list(sizes)
        self._left = sum(sizes)
        self._descriptors: list[int] = []
        try:
            for size in sizes:
                self._descriptors.append(segments.create())
                os.ftruncate(self._descriptors[-1], size)
        except BaseException:  # an interrupt too would leave the memory taken
            self.close()
            raise

    def take(self, chunk: Chunk) -> bool:
        """Write what has come. Returns whether it was the last.

        Raises:
            OSError: There is no memory for it, or it is not part of what was to come.
        """
        sizes = self._sizes[chunk.number : chunk.number + 1] if chunk.number >= 0 else []
        if not sizes or not 0 <= chunk.offset <= sizes[0] - len(chunk.data):
            raise OSError(errno.EPROTO, "the other machine sent something else")
        view, offset = memoryview(chunk.data), chunk.offset
        while view:
            done = os.pwrite(self._descriptors[chunk.number], view, offset)
            view, offset = view[done:], offset + done
        self._left -= len(chunk.data)
        if self._left == 0:
            for descriptor in self._descriptors:
                segments.seal(descriptor)
        return self._left == 0

    @property
    def segments(self) -> list[Segment]:
        """Where processes of this machine find them."""
        return [segments.segment_of(descriptor) for descriptor in self._descriptors]

    def close(self) -> None:
        """Let go of the segments."""
        while self._descriptors:
            os.close(self._descriptors.pop())
