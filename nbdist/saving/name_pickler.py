"""The names of a rank as bytes and back: shared objects stay shared, and what was prepared is there already.

A name that can't be pickled, or made again, is left out alone, with the reason. Functions of cells go without the names
that they use: those come with the namespace that they get.
"""

from __future__ import annotations

import contextvars
import functools
import hashlib
import io
import pickle
import pickletools
import re
import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from nbdist.saving.saved_session import LeftOut
from nbdist.transfer.explain import explain, short
from nbdist.transfer.pickling import ValuePickler, arriving
from nbdist.wire.base.parcel import Span

Reference = tuple[str, int, str]  # a role, which of it, and what of it: ("modules", 0, "layers.1")

_THINGS = {
    "models": "a model",
    "modules": "a part of a model",
    "parameters": "a parameter of a model",
    "optimizers": "an optimizer",
    "schedulers": "a scheduler",
    "loaders": "a loader",
    "registered": "an object for checkpoints",
    "scaler": "a gradient scaler",
}
_RANDOM = re.compile("[0-9a-f]{32}")  # a UUID
_LARGE = 1 << 20  # bytes; an array of at least as many is written like a tensor
_OF_THIS_RUN = (DTensor, DeviceMesh, ProcessGroup)


class _OfThisRunError(Exception):
    """What has a meaning among these ranks only. Its text says why."""


class _GoneError(Exception):
    """What the pickled names refer to, and is not there. Its text names it."""


@dataclass
class PickledNames:
    """The names of a rank as bytes.

    Attributes:
        streams: By name; in the order in which they refer to each other.
        buffers: What each of them has beside its stream.
        storages: The memory of all tensors, as bytes, where it is.
        uses: Which of these each name was the first to use.
        left_out: Names that can't be pickled.
    """

    streams: dict[str, bytes] = field(default_factory=dict)
    buffers: dict[str, list[bytes]] = field(default_factory=dict)
    storages: list[torch.Tensor] = field(default_factory=list)
    uses: dict[str, list[int]] = field(default_factory=dict)
    left_out: list[LeftOut] = field(default_factory=list)

    def content(self) -> dict[str, Any]:
        """Return what a file holds of it: tensors of bytes, in dicts and lists of numbers."""
        return {
            "streams": {name: _as_tensor(stream) for name, stream in self.streams.items()},
            "buffers": {name: [_as_tensor(each) for each in own] for name, own in self.buffers.items() if own},
            "storages": self.storages,
            "uses": {name: own for name, own in self.uses.items() if own},
        }

    @classmethod
    def of(cls, content: Mapping[str, Any]) -> PickledNames:
        """Return what a file holds."""
        names = content["streams"]
        return cls(
            {name: _as_bytes(stream) for name, stream in names.items()},
            {name: [_as_bytes(each) for each in content["buffers"].get(name, ())] for name in names},
            content["storages"],
            {name: content["uses"].get(name, []) for name in names},
        )

    @property
    def size(self) -> int:
        """Bytes of all of it."""
        small = sum(map(len, self.streams.values())) + sum(len(each) for own in self.buffers.values() for each in own)
        return small + sum(each.numel() for each in self.storages)

    def digests(self) -> dict[str, bytes]:
        """Return a hash of each name's bytes: equal ones stand for equal values."""
        return {name: self._digest(name) for name in self.streams}

    def _digest(self, name: str) -> bytes:
        found = hashlib.blake2b(self.streams[name], digest_size=16)
        for buffer in self.buffers[name]:
            found.update(buffer)
        for number in self.uses[name]:
            found.update(self.storages[number].cpu().numpy().data)
        return found.digest()


def _as_tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)


def _as_bytes(tensor: torch.Tensor) -> bytes:
    return tensor.cpu().numpy().tobytes()


@dataclass(frozen=True)
class Surroundings:
    """What names refer to, and what is there before they are made again.

    Attributes:
        namespace: Of the rank's cells. Its classes are used where names need them; others come with the names.
        prepared: What is prepared and made of it, by what refers to it, wrappers before what they wrap.
    """

    namespace: dict[str, Any]
    prepared: Mapping[Reference, Any]


def pickle_names(values: Mapping[str, Any], around: Surroundings) -> PickledNames:
    """Make bytes of a rank's names. What can't be is left out, with the reason.

    Args:
        values: By name.
        around: What they refer to.
    """
    left_out: dict[str, str] = {}
    while True:
        pickled, failed = _attempt({name: value for name, value in values.items() if name not in left_out}, around)
        if not failed:
            pickled.left_out = [LeftOut(name, why) for name, why in left_out.items()]
            return pickled
        left_out |= failed  # what follows may refer to parts of what has failed: anew without it


def _attempt(values: Mapping[str, Any], around: Surroundings) -> tuple[PickledNames, dict[str, str]]:
    """Return the names as bytes, worth something only if none has failed; and why those have that have."""
    pickled, failed = PickledNames(), {}
    pickler = _NamePickler(around)
    for name, value in values.items():
        try:
            pickled.streams[name], pickled.buffers[name], pickled.uses[name] = pickler.take(value)
        except Exception as error:  # objects raise what they like when they are pickled
            failed[name] = _reason(name, value, pickler, error)
    pickled.storages = [_bytes_of(storage.storage) for storage in pickler.storages.values()]
    return pickled, failed


def _reason(name: str, value: Any, pickler: _NamePickler, error: Exception) -> str:
    around = pickler.around
    found = explain(value, name, pickler.latest, error, functools.partial(_pickles, around=around))
    part = found.part.replace(f"{name} is ", "it is ", 1) if found.part.startswith(f"{name} is ") else found.part
    if isinstance(error, _OfThisRunError):
        return f"{part}, {error}"
    return part or short(error)


def _pickles(value: object, *, around: Surroundings) -> bool:
    try:
        _NamePickler(around).take(value)
    except Exception:  # as above
        return False
    return True


def _bytes_of(storage: Any) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


class _NamePickler(ValuePickler):
    """Takes one value after another; what later ones share with earlier ones is written once."""

    def __init__(self, around: Surroundings) -> None:
        super().__init__()
        self.around = around
        self._references: dict[int, Reference] = {}
        for reference, value in around.prepared.items():
            self._references.setdefault(id(value), reference)
        self._own_gpu = torch.cuda.current_device() if torch.cuda.is_initialized() else -1

    def take(self, value: Any) -> tuple[bytes, list[bytes], list[int]]:
        """Return a value's stream, its buffers, and the numbers of the storages that it is the first to use."""
        self.chunks.clear()
        self.buffers.clear()
        known = len(self.storages)
        self.dump(value)
        stream = b"".join(self.chunks)
        return stream, [bytes(buffer.raw()) for buffer in self.buffers], list(range(known, len(self.storages)))

    def reducer_override(self, obj: Any) -> Any:
        """Return what an object is made from again; see `pickle.Pickler`."""
        self.latest = obj
        if (reference := self._references.get(id(obj))) is not None:
            return _prepared, (reference,)
        if isinstance(obj, _OF_THIS_RUN):
            raise _OfThisRunError("which belongs to the process groups of these ranks")
        if isinstance(obj, types.FunctionType) and obj.__globals__ is self.around.namespace:
            return _reduce_function(obj)
        if isinstance(obj, torch.device) and obj.type == "cuda" and obj.index == self._own_gpu:
            return _own_device, ()
        if (found := _as_storage(obj)) is not None:
            return found
        reduced = super().reducer_override(obj)
        if not isinstance(obj, type) or not isinstance(reduced, tuple):
            return reduced
        reduced = _same_on_all_ranks(reduced)
        if obj.__module__ != "__main__" or _known_class(self.around.namespace, obj.__qualname__) is not obj:
            return reduced
        make, arguments, state, _, _, fill = reduced
        return _class, (obj.__qualname__, make, arguments), (fill, state), None, None, _fill_class


def _same_on_all_ranks(reduced: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return how a class is written without the random number by which cloudpickle would know it again."""
    make, arguments, *others = reduced
    plain = tuple(None if isinstance(each, str) and _RANDOM.fullmatch(each) else each for each in arguments)
    return make, plain, *others


def _as_storage(obj: Any) -> Any:
    """Return how a large array is written, as a tensor is; None for what is none."""
    kind = type(obj)
    if (kind.__module__, kind.__qualname__) != ("numpy", "ndarray") or obj.nbytes < _LARGE:
        return None
    is_plain = obj.flags.c_contiguous and obj.flags.writeable and obj.dtype.kind in "biufc" and obj.dtype.isnative
    return (_array, (torch.from_numpy(obj.reshape(-1).view("u1")), obj.dtype.str, obj.shape)) if is_plain else None


def _reduce_function(function: types.FunctionType) -> Any:
    """Return what a function of a cell is made from; not the names that it uses, as they come by themselves."""
    closure = function.__closure__ or ()
    contents = [_content(cell) for cell in closure]
    state = {
        "defaults": function.__defaults__,
        "keyword_defaults": function.__kwdefaults__,
        "attributes": function.__dict__,
        "annotations": function.__annotations__,
        "qualified": function.__qualname__,
        "module": function.__module__,
        "doc": function.__doc__,
    }
    return _function, (function.__code__, function.__name__, len(closure)), (state, contents), None, None, _fill


def _content(cell: types.CellType) -> tuple[Any, ...]:
    try:
        return (cell.cell_contents,)
    except ValueError:  # not assigned yet
        return ()


# Making them again. The streams call these functions by name.

_around: contextvars.ContextVar[Surroundings] = contextvars.ContextVar("nbdist_surroundings")


def make_names(pickled: PickledNames, around: Surroundings) -> tuple[dict[str, Any], list[LeftOut]]:
    """Return the values of names by their names, and those that can't be made here.

    Args:
        pickled: The names as bytes.
        around: What is there before them.
    """
    storages = [(Span(0, each.numel()), each.untyped_storage()) for each in pickled.storages]
    making = _Making(pickled)
    token = _around.set(around)
    try:
        with arriving(storages):
            for name in pickled.streams:
                making.make(name)
    finally:
        _around.reset(token)
    return making.values, making.left_out


class _Making:
    """Makes one name after another. What refers to a part of one that can't be made can't be, either."""

    def __init__(self, pickled: PickledNames) -> None:
        self._pickled = pickled
        self._renew([])
        self._made: list[str] = []  # and those that were not, in this order
        self._spoiled: dict[str, range] = {}  # of the unpickler's memo, by the name that was left out
        self.values: dict[str, Any] = {}
        self.left_out: list[LeftOut] = []

    def make(self, name: str) -> None:
        """Make the next one."""
        stream = self._pickled.streams[name]
        used = _refers_to(stream) if self._spoiled else set()
        other = next((other for other, spoiled in self._spoiled.items() if used.intersection(spoiled)), None)
        if other is not None:
            self._leave_out(name, f"it shares a part with {other!r}, which can't be made again")
        else:
            self._source.open(stream, self._pickled.buffers[name])
            try:
                self.values[name] = self._unpickler.load()
            except Exception as error:  # objects raise what they like when they are made again
                gone = isinstance(error, _GoneError)
                self._leave_out(name, str(error) if gone else f"it can't be made again ({short(error)})")
        self._made.append(name)

    def _leave_out(self, name: str, why: str) -> None:
        """Have later streams find in the memo what they refer to, although this one was not read to its end."""
        self.left_out.append(LeftOut(name, why))
        first = sum(_memoized(self._pickled.streams[each]) for each in self._made)
        spoiled = range(first, first + _memoized(self._pickled.streams[name]))
        known = self._unpickler.memo.copy()
        self._renew([known.get(number) for number in range(spoiled.stop)])
        self._spoiled[name] = spoiled

    def _renew(self, memo: Sequence[Any]) -> None:
        """Have an unpickler that holds nothing of a stream that was not read to its end."""
        self._source = _Source()
        self._unpickler: Any = _Unpickler(self._source, memo)
        self._source.open(_REMEMBER_ALL[0] + b"".join(map(_remember, range(len(memo)))) + _REMEMBER_ALL[1], ())
        self._unpickler.load()


def _memoized(stream: bytes) -> int:
    """Return how many entries of the memo a stream makes."""
    return sum(opcode.name == "MEMOIZE" for opcode, _, _ in pickletools.genops(stream))


def _refers_to(stream: bytes) -> set[int]:
    """Return the entries of the memo that a stream uses."""
    return {int(str(argument)) for opcode, argument, _ in pickletools.genops(stream) if opcode.name.endswith("BINGET")}


_REMEMBER_ALL = pickle.PROTO + b"\x05", pickle.NONE + pickle.STOP


def _remember(number: int) -> bytes:
    """Return the opcodes that put an entry of an earlier memo into the next."""
    return pickle.BININT + number.to_bytes(4, "little") + pickle.BINPERSID + pickle.MEMOIZE + pickle.POP


class _Unpickler(pickle.Unpickler):
    """Reads streams that go on with an earlier memo: the memo that a C unpickler is given is not the one it uses."""

    def __init__(self, source: _Source, memo: Sequence[Any]) -> None:
        super().__init__(source, buffers=source.buffers())
        self._memo_before = memo

    def persistent_load(self, number: int) -> Any:
        """Return an entry of the earlier memo."""
        return self._memo_before[number]


class _Source:
    """A file for the unpickler that holds one stream after another, and their buffers."""

    def __init__(self) -> None:
        self._stream = io.BytesIO()
        self._buffers: Sequence[bytes] = ()

    def open(self, stream: bytes, buffers: Sequence[bytes]) -> None:
        """Go on with another stream."""
        self._stream, self._buffers = io.BytesIO(stream), buffers

    def read(self, size: int = -1) -> bytes:
        """Read like a file."""
        return self._stream.read(size)

    def readline(self) -> bytes:
        """Read like a file."""
        return self._stream.readline()

    def buffers(self) -> Iterator[bytearray]:
        """Yield the buffers of the streams, writable ones as their owners had."""
        while True:
            first, *self._buffers = self._buffers
            yield bytearray(first)


def _prepared(reference: Reference) -> Any:
    found = _around.get().prepared.get(reference)
    if found is None:
        raise _GoneError(f"it is, or holds, {_THINGS[reference[0]]} that no setup cell prepares")
    return found


def _known_class(namespace: Mapping[str, Any], qualified: str) -> type | None:
    """Return the class with this name; None: there is none."""
    first, *others = qualified.split(".")
    try:
        found = functools.reduce(getattr, others, namespace[first])
    except (AttributeError, KeyError):
        return None
    return found if isinstance(found, type) else None


def _class(qualified: str, make: Any, arguments: tuple[Any, ...]) -> Any:
    """Return the class that a cell has defined again, of which the objects of setup cells are; else make it."""
    return _known_class(_around.get().namespace, qualified) or make(*arguments)


def _fill_class(made: type, state: tuple[Any, Any]) -> None:
    if _known_class(_around.get().namespace, made.__qualname__) is not made:
        fill, content = state
        fill(made, content)


def _own_device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


def _array(data: torch.Tensor, dtype: str, shape: tuple[int, ...]) -> Any:
    return data.numpy().view(dtype).reshape(shape)


def _function(code: types.CodeType, name: str, cells: int) -> types.FunctionType:
    closure = tuple(types.CellType() for _ in range(cells))
    return types.FunctionType(code, _around.get().namespace, name, None, closure)


def _fill(function: types.FunctionType, state: tuple[dict[str, Any], list[tuple[Any, ...]]]) -> None:
    values, contents = state
    function.__defaults__, function.__kwdefaults__ = values["defaults"], values["keyword_defaults"]
    function.__dict__.update(values["attributes"])
    function.__annotations__, function.__qualname__ = values["annotations"], values["qualified"]
    function.__module__, function.__doc__ = values["module"], values["doc"]
    for cell, content in zip(function.__closure__ or (), contents, strict=True):
        if content:
            cell.cell_contents = content[0]
