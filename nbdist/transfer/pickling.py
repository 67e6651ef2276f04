"""From an object to a parcel and back: cloudpickle, protocol 5, with buffers and tensor storages out of band."""

from __future__ import annotations

import contextlib
import contextvars
import errno
import functools
import os
import pickle
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from nbdist.base import text
from nbdist.base.code_pickler import CodePickler
from nbdist.errors import TransferError
from nbdist.transfer.explain import OnGpuError, explain, quoted, short
from nbdist.transfer.parcels import (
    OWN_LIMIT,
    Packed,
    Payload,
    Storage,
    free_memory,
    map_segments,
    reader,
    torch_if_imported,
)
from nbdist.wire.base.parcel import Parcel, Span

INLINE_LIMIT = 1 << 20  # bytes; payloads below it lie inside the parcel


def pack(obj: object, *, name: str = "value", cuda: bool = True) -> Packed:
    """Make a parcel of a value.

    Args:
        obj: Anything that cloudpickle takes.
        name: What the user calls it; errors use it.
        cuda: Whether tensors on GPUs may travel; they arrive on the CPU.

    Returns:
        The parcel, to be closed when all receivers have unpacked it.

    Raises:
        TransferError: A part of it does not pickle (the text names the part), or there is no memory for it.
            Nothing is left behind.
    """
    pickler = _pickle(obj, name, cuda)
    payload = Payload()
    stream = payload.add(reader([memoryview(chunk) for chunk in pickler.chunks]))
    buffers = [payload.add(reader([buffer.raw()])) for buffer in pickler.buffers]
    storages = [payload.add_storage(storage) for storage in pickler.storages.values()]
    if payload.size < INLINE_LIMIT or not hasattr(os, "memfd_create"):
        return Packed(Parcel(name, stream, buffers, storages, inline=payload.join()), [])
    try:
        if payload.size > (free := free_memory()):
            raise OSError(errno.ENOMEM, f"{text.size(free)} are free")
        segments, descriptors = payload.write()
    except OSError as error:
        raise TransferError(
            f"cannot send {quoted(name)}: no memory for its {text.size(payload.size)} ({error.strerror}); "
            "free some, or send it in parts"
        ) from error
    return Packed(Parcel(name, stream, buffers, storages, segments=segments), descriptors)


def check(obj: object, *, name: str, cuda: bool = True) -> None:
    """Raise the TransferError that `pack` would, if a part of the value does not pickle. Copies no large buffer."""
    _pickle(obj, name, cuda)


@dataclass(frozen=True)
class Unsent:
    """Stands for a value that could not be sent.

    Attributes:
        why: In words.
    """

    why: str


def _pickle(obj: object, name: str, cuda: bool) -> ValuePickler:
    pickler = ValuePickler(cuda)
    try:
        pickler.dump(obj)
    except Exception as error:  # objects raise what they like when they are pickled
        raise explain(obj, name, pickler.latest, error, functools.partial(_pickles, cuda=cuda)) from error
    return pickler


def unpack(parcel: Parcel) -> Any:
    """Make the value of a parcel. Several processes may, each gets its own.

    No descriptor stays open.

    Raises:
        TransferError: The sender has ended or let go of the parcel, or the value can't be rebuilt here.
    """
    payload = map_segments(parcel) if parcel.segments else memoryview(parcel.inline)

    def arrived(span: Span) -> memoryview | bytearray:
        part = payload[span.offset : span.offset + span.size]
        return part if parcel.segments and span.size >= OWN_LIMIT else bytearray(part)

    storages = [(span, _new_storage(arrived(span))) for span in parcel.storages]
    try:
        with arriving(storages):
            return pickle.loads(arrived(parcel.pickle), buffers=map(arrived, parcel.buffers))
    except Exception as error:  # objects raise what they like when they are made again
        raise TransferError(
            f"{quoted(parcel.name)} has arrived, but can't be rebuilt in this process ({short(error)}); "
            "import or install here what it needs"
        ) from error


@contextlib.contextmanager
def arriving(storages: Sequence[tuple[Span, Any]]) -> Iterator[None]:
    """Have what a ValuePickler has written find its storages meanwhile.

    Args:
        storages: In the order of their numbers; each with the part of the one before that it holds.
    """
    token = _arrived.set(storages)
    try:
        yield
    finally:
        _arrived.reset(token)


def _pickles(obj: object, *, cuda: bool) -> bool:
    try:
        ValuePickler(cuda).dump(obj)
    except Exception:  # as above
        return False
    return True


# Pickling: buffers and storages are put aside, everything else becomes a stream of chunks.


class _Chunks(list["bytes | bytearray"]):
    """A file for the pickler. Large bytes objects come as they are, and are kept without a copy."""

    def write(self, data: bytes | bytearray | memoryview) -> int:
        # A memoryview that the pickler hands out is valid during this call only.
        self.append(bytes(data) if isinstance(data, memoryview) else data)
        return len(data)


class ValuePickler(CodePickler):
    """Cloudpickle, protocol 5, with tensor storages kept out of the stream.

    Args:
        cuda: Whether tensors on GPUs may travel.

    Attributes:
        latest: The object taken up last: after an error, the one that does not pickle.
    """

    def __init__(self, cuda: bool = True) -> None:
        self._cuda = cuda
        self.chunks = _Chunks()
        self.buffers: list[pickle.PickleBuffer] = []
        self.storages: dict[tuple[str, int], Storage] = {}
        self.latest: object = None
        self._torch: Any = torch_if_imported()
        super().__init__(self.chunks, protocol=5, buffer_callback=self.buffers.append)

    def reducer_override(self, obj: Any) -> Any:
        """Return what an object is made from again; see `pickle.Pickler`."""
        self.latest = obj
        if self._torch is not None:
            if not self._cuda and isinstance(obj, self._torch.Tensor) and obj.is_cuda:
                raise OnGpuError(str(obj.device))
            if type(obj) in (self._torch.Tensor, self._torch.nn.Parameter):
                if _is_plain(self._torch, obj):
                    return self._reduce_tensor(obj)
            elif isinstance(obj, self._torch.UntypedStorage):
                if obj.device.type in ("cpu", "cuda"):
                    return self._reduce_storage(obj)
            elif isinstance(obj, self._torch.storage.TypedStorage) and hasattr(obj, "_untyped_storage"):
                # Private, as the public way warns; where it is missing, subclasses of tensors arrive as copies.
                return _rebuild_typed_storage, (obj._untyped_storage, obj.dtype)
        return super().reducer_override(obj)

    def _reduce_tensor(self, tensor: Any) -> Any:
        self._torch.utils.hooks.warn_if_has_hooks(tensor)
        first = last = 0
        if tensor.numel():
            steps = zip(tensor.shape, tensor.stride(), strict=True)
            reach = sum((size - 1) * stride for size, stride in steps)
            first = tensor.storage_offset() * tensor.element_size()
            last = first + (reach + 1) * tensor.element_size()
        storage = self._storage(tensor.untyped_storage())
        if last > storage.storage.nbytes():
            raise ValueError("its memory has been freed (resized to 0, as sharded training does)")
        storage.need(first, last, tensor)
        arguments = (
            storage.number,
            tensor.dtype,
            first,
            tuple(tensor.shape),
            tensor.stride(),
            tensor.requires_grad,
            type(tensor) is not self._torch.Tensor,
        )
        return _rebuild_tensor, arguments, tensor.__dict__ or None, None, None, _set_attributes

    def _reduce_storage(self, untyped: Any) -> Any:
        storage = self._storage(untyped)
        storage.need(0, untyped.nbytes())
        return _rebuild_storage, (storage.number,)

    def _storage(self, untyped: Any) -> Storage:
        # Storage objects come and go around the same memory: the address tells which are one.
        key = str(untyped.device), untyped.data_ptr()
        storage = self.storages.setdefault(key, Storage(len(self.storages), untyped))
        if untyped.nbytes() > storage.storage.nbytes():
            storage.storage = untyped
        return storage


def _is_plain(torch: Any, tensor: Any) -> bool:
    """Return whether a storage, an offset and strides are all there is to it; torch itself reduces other tensors."""
    return (
        tensor.layout is torch.strided
        and tensor.device.type in ("cpu", "cuda")
        and not (tensor.is_quantized or tensor.is_nested or tensor.is_conj() or tensor.is_neg())
    )


# Rebuilding: the pickle stream names storages by number, and calls these functions by name.

_arrived: contextvars.ContextVar[Sequence[tuple[Span, Any]]] = contextvars.ContextVar("nbdist_arrived")


def _torch() -> Any:
    import torch

    return torch


def _new_storage(data: memoryview | bytearray) -> Any:
    torch = _torch()
    if not data:
        return torch.UntypedStorage(0)
    return torch.frombuffer(data, dtype=torch.uint8).untyped_storage()


def _rebuild_storage(number: int) -> Any:
    return _arrived.get()[number][1]


def _rebuild_typed_storage(untyped: Any, dtype: Any) -> Any:
    return _torch().storage.TypedStorage(wrap_storage=untyped, dtype=dtype, _internal=True)


def _rebuild_tensor(
    number: int,
    dtype: Any,
    first: int,
    shape: tuple[int, ...],
    stride: tuple[int, ...],
    requires_grad: bool,
    is_parameter: bool,
) -> Any:
    torch = _torch()
    span, storage = _arrived.get()[number]
    if span.dense:
        # Empty tensors that hold the shape give its row-major strides.
        offset, stride = 0, torch.empty(shape, device="meta").stride()
    else:
        offset = max(first - span.start, 0) // dtype.itemsize
    tensor = torch.empty(0, dtype=dtype, device=storage.device).set_(storage, offset, shape, stride)
    return torch.nn.Parameter(tensor, requires_grad) if is_parameter else tensor.requires_grad_(requires_grad)


def _set_attributes(tensor: Any, attributes: dict[str, Any]) -> None:
    # Tensor.__setstate__ is something else, from long ago.
    tensor.__dict__.update(attributes)
