"""Parcels and the memory that large ones travel in: memfd segments, written once and mapped copy-on-write.

Knows bytes and tensor storages; independent of pickling.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeAlias

import msgspec

from nbdist.base import text
from nbdist.errors import TransferError
from nbdist.metrics.node import host
from nbdist.wire import segments
from nbdist.wire.base.parcel import Parcel, Segment, Span

OWN_LIMIT = 64 << 10  # bytes; a buffer below it is copied on arrival, so that it keeps no segment alive
_DENSE_LIMIT = 1 << 20  # bytes; spans below it are never made dense
_STRIPE_LIMIT = 64 << 20  # bytes; payloads above it are written by several threads
_MAX_STRIPES = 4
_CHUNK = 32 << 20  # bytes written between two looks at whether to stop
_LINE = 64  # bytes; no dtype is larger, and vector code likes it
_MAP_FIXED = 0x10
_MAP_NORESERVE = 0x4000


class Packed:
    """A parcel, and the sender's hold on its segments.

    Keep it until every receiver has called `unpack`, then `close()` it (or leave its `with` block). What has
    been unpacked by then stays valid; a receiver that comes later gets a TransferError.
    """

    def __init__(self, parcel: Parcel, descriptors: list[int]) -> None:
        self.parcel = parcel
        self._release = weakref.finalize(self, _close_all, descriptors)

    def close(self) -> None:
        """Let go of the segments. Closing twice is fine."""
        self._release()

    def __enter__(self) -> Packed:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Storage:
    """A tensor storage, and which of its bytes a parcel needs."""

    def __init__(self, number: int, storage: Any) -> None:
        self.number = number
        self.storage = storage
        self.tensors: list[Any] = []
        self.used: list[tuple[int, int]] = []

    def need(self, first: int, last: int, tensor: Any = None) -> None:
        """Note that bytes `first` to `last` have to be sent, for this tensor or for the storage itself."""
        self.tensors.append(tensor)
        if first < last:
            self.used.append((first, last))

    def dense(self) -> Any:
        """Return the tensor to be sent without gaps, or None."""
        tensor = self.tensors[0] if len(self.tensors) == 1 else None
        if tensor is None or not self.used:
            return None
        [(first, last)] = self.used
        worthwhile = max(_DENSE_LIMIT, 2 * tensor.numel() * tensor.element_size())
        return tensor if last - first >= worthwhile else None

    def merged(self) -> list[tuple[int, int]]:
        """Return the bytes needed, as sorted ranges that do not touch. Starts are rounded down, to fit any dtype."""
        ranges: list[tuple[int, int]] = []
        for first, last in sorted((first - first % _LINE, last) for first, last in self.used):
            if ranges and first <= ranges[-1][1]:
                ranges[-1] = ranges[-1][0], max(last, ranges[-1][1])
            else:
                ranges.append((first, last))
        return ranges


# The payload: pieces of memory at offsets, written without gathering them first.

_Reader: TypeAlias = Callable[[int, int], Iterator[memoryview]]
"""Gives the bytes from the first argument up to the second, in views valid until the next is asked for."""


class Payload:
    """Collects what has to be sent, then writes it: into one bytes object, or into segments."""

    def __init__(self) -> None:
        self.size = 0
        self._pieces: list[tuple[int, int, _Reader]] = []

    def add(self, source: tuple[int, _Reader]) -> Span:
        """Add what a reader gives."""
        size, read = source
        span = self._place(size)
        self._pieces.append((span.offset, size, read))
        return span

    def add_storage(self, storage: Storage) -> Span:
        """Add the bytes of a storage that are needed."""
        tensor = storage.dense()
        if tensor is not None:
            size = tensor.numel() * tensor.element_size()
            whole = tensor.detach().contiguous().untyped_storage()
            return msgspec.structs.replace(self.add((size, _storage_reader(whole, 0))), dense=True)
        ranges = storage.merged()
        if not ranges:
            return self._place(0)
        start = ranges[0][0]
        span = self._place(ranges[-1][1] - start)
        for first, last in ranges:
            read = _storage_reader(storage.storage, first)
            self._pieces.append((span.offset + first - start, last - first, read))
        return msgspec.structs.replace(span, start=start)

    def join(self) -> bytes:
        """Return everything as one bytes object."""
        whole = bytearray(self.size)
        for view, offset in self._between(0, self.size):
            whole[offset : offset + len(view)] = view
        return bytes(whole)

    def write(self) -> tuple[list[Segment], list[int]]:
        """Write everything into fresh memfds. Returns them and their descriptors, which the caller closes."""
        # Writers of one file wait for each other, so each thread has a file of its own.
        count = min(_MAX_STRIPES, len(os.sched_getaffinity(0))) if self.size > _STRIPE_LIMIT else 1
        stripe = _round_up(-(-self.size // count), mmap.PAGESIZE)
        descriptors: list[int] = []
        stop = threading.Event()

        def fill(descriptor: int, first: int) -> None:
            self._fill(descriptor, first, min(first + stripe, self.size), stop)

        try:
            while len(descriptors) < count:
                descriptors.append(segments.create())
            with ThreadPoolExecutor(count - 1 or 1) as pool:
                try:
                    others = [pool.submit(fill, descriptors[i], i * stripe) for i in range(1, count)]
                    fill(descriptors[0], 0)
                    for other in others:
                        other.result()
                except BaseException:  # Ctrl-C included: the other threads would go on writing
                    stop.set()
                    raise
            return [segments.segment_of(descriptor) for descriptor in descriptors], descriptors
        except BaseException:  # Ctrl-C included: their memory would be kept
            _close_all(descriptors)
            raise

    def _fill(self, descriptor: int, first: int, last: int, stop: threading.Event) -> None:
        os.ftruncate(descriptor, last - first)
        for view, offset in self._between(first, last):
            done = 0
            while done < len(view) and not stop.is_set():
                done += os.pwrite(descriptor, view[done : done + _CHUNK], offset - first + done)
        segments.seal(descriptor)

    def _between(self, first: int, last: int) -> Iterator[tuple[memoryview, int]]:
        """Yield what lies from first up to last, as views and their offsets."""
        for offset, size, read in self._pieces:
            begin, end = max(first, offset), min(last, offset + size)
            if begin >= end:
                continue
            for view in read(begin - offset, end - offset):
                yield view, begin
                begin += len(view)

    def _place(self, size: int) -> Span:
        offset = _round_up(self.size, mmap.PAGESIZE if size >= OWN_LIMIT else _LINE)
        self.size = offset + size
        return Span(offset, size)


def reader(views: list[memoryview]) -> tuple[int, _Reader]:
    """Size and reader of views that lie one after the other."""

    def read(first: int, last: int) -> Iterator[memoryview]:
        for view in views:
            part = view[max(first, 0) : max(last, 0)]
            if part:
                yield part
            first, last = first - len(view), last - len(view)

    return sum(len(view) for view in views), read


def _storage_reader(storage: Any, start: int) -> _Reader:
    """Return reader of a storage's bytes, counted from start."""

    def read(first: int, last: int) -> Iterator[memoryview]:
        if storage.device.type == "cpu":
            yield _memory(storage.data_ptr() + start + first, last - first)
        else:
            yield from _device_bytes(storage, start + first, last - first)

    return read


def _device_bytes(storage: Any, first: int, size: int) -> Iterator[memoryview]:
    # Through one chunk of pinned memory: `.cpu()` would take as much host memory as the tensor has.
    import torch

    torch.cuda.synchronize(storage.device)
    source = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage, first, (size,), (1,))
    chunk = torch.empty(min(size, _CHUNK), dtype=torch.uint8, device="cpu", pin_memory=True)
    for part in source.split(chunk.numel()):
        chunk[: part.numel()].copy_(part)
        yield _memory(chunk.data_ptr(), part.numel())


def _memory(address: int, size: int) -> memoryview:
    return memoryview((ctypes.c_char * size).from_address(address)).cast("B")


def free_memory() -> int:
    """Return the bytes that this machine, or container, can give. Linux promises more, and kills for it later."""
    with open("/proc/meminfo") as file:
        sizes = {name: int(size.split()[0]) << 10 for name, size in (line.split(":") for line in file)}
    limit, used = host.memory()
    return limit - used if limit < sizes["MemTotal"] else sizes["MemAvailable"] + sizes["SwapFree"]


def torch_if_imported() -> Any:
    """Return the module torch, or None: then no value can hold anything of it."""
    torch = sys.modules.get("torch")
    # Another thread may be in the middle of importing it; then no value can hold a tensor yet.
    return torch if hasattr(torch, "nn") and hasattr(torch, "UntypedStorage") else None


def _round_up(number: int, step: int) -> int:
    return -(-number // step) * step


def _close_all(descriptors: list[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


# Mapping. By libc: the standard library's mmap keeps a descriptor open for each mapping.


def map_segments(parcel: Parcel) -> memoryview:
    """Map the segments one after the other, copy-on-write, until nothing uses the memory any more."""
    libc = _libc()
    private = mmap.MAP_PRIVATE | _MAP_NORESERVE
    address = libc.mmap(None, parcel.size, 0, private | mmap.MAP_ANONYMOUS, -1, 0)
    if address == ctypes.c_void_p(-1).value:
        raise _no_mapping(parcel)
    area = (ctypes.c_char * parcel.size).from_address(address)
    # Not at exit: other threads and finalizers may still use the memory then.
    weakref.finalize(area, libc.munmap, address, parcel.size).atexit = False
    for segment in parcel.segments:
        descriptor = _open(segment, parcel.name)
        try:
            protection = mmap.PROT_READ | mmap.PROT_WRITE
            mapped = libc.mmap(address, segment.size, protection, private | _MAP_FIXED, descriptor, 0)
        finally:
            os.close(descriptor)
        if mapped != address:
            raise _no_mapping(parcel)
        address += segment.size
    return memoryview(area).cast("B")


def _no_mapping(parcel: Parcel) -> TransferError:
    reason = os.strerror(ctypes.get_errno())
    return TransferError(
        f"cannot receive {parcel.name!r}: its {text.size(parcel.size)} can't be mapped ({reason}); "
        "free some memory in this process, or send it in parts"
    )


def _open(segment: Segment, name: str) -> int:
    try:
        return segments.open_segment(segment)
    except segments.Unreachable as error:
        raise TransferError(f"cannot receive {name!r}: {error}; send it again") from error


@functools.cache
def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    return libc
