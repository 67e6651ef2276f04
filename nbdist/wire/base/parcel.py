"""A value between two processes: where its pickle and its large buffers lie. How they get there is for `transfer`."""

from __future__ import annotations

import msgspec


class Segment(msgspec.Struct, frozen=True, array_like=True):
    """A memfd of the sender, which the receiver opens as /proc/<pid>/fd/<fd>.

    Attributes:
        pid: The process that holds it.
        fd: Its descriptor there.
        inode: What shows that the descriptor is still the same file.
        size: Bytes.
    """

    pid: int
    fd: int
    inode: int
    size: int


class Span(msgspec.Struct, frozen=True, array_like=True):
    """Where one buffer lies in the payload.

    Attributes:
        offset: Its first byte, counted from the payload's beginning.
        size: Bytes.
        start: For a tensor's storage: which byte of the sender's storage comes first.
        dense: For a tensor's storage: it holds one tensor, without gaps and in row-major order.
    """

    offset: int
    size: int
    start: int = 0
    dense: bool = False


class Parcel(msgspec.Struct, frozen=True):
    """A value on its way. Small, whatever it stands for; any codec of msgspec carries it.

    Attributes:
        name: What the user calls the value.
        pickle: Where the pickle stream lies in the payload.
        buffers: Where its out-of-band buffers lie, in the order of the stream.
        storages: Where the tensors' storages lie, by number.
        inline: The payload, unless it lies in segments.
        segments: What the payload lies in, one after the other.
    """

    name: str
    pickle: Span
    buffers: list[Span]
    storages: list[Span]
    inline: bytes = b""
    segments: list[Segment] = []

    @property
    def size(self) -> int:
        """Bytes of the payload."""
        return sum(segment.size for segment in self.segments) or len(self.inline)

    def __repr__(self) -> str:
        where = f"{len(self.segments)} segments" if self.segments else "inline"
        return f"Parcel({self.name!r}, {self.size} bytes, {where})"
