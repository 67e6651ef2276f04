"""Which live tensors and arrays there are, by the names under which a user knows them: "model.layers.0.weight".

Looks only at what objects hold (containers, modules, attributes); calls nothing of the user's, so no property runs.
"""

from __future__ import annotations

import gc
import sys
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import msgspec

_SECONDS = 0.5  # that a search may take
_WIDTH = 10_000  # items of one container that are looked at
_DEPTH = 12  # attributes and items between a name and a tensor
_OPAQUE = (type(sys), type, str, bytes, int, float, complex, type(None), type(len), type(_ for _ in ()))


class Block(msgspec.Struct, frozen=True):
    """Memory that tensors share.

    Attributes:
        name: How to get at one of them.
        size: Bytes, of the whole storage.
        device: "cpu" or "cuda:0".
        shape: Of that one.
        dtype: Likewise.
    """

    name: str
    size: int
    device: str
    shape: tuple[int, ...]
    dtype: str

    def describe(self) -> str:
        """Describe the tensor: "model.weight (float32, 1024 x 1024)"."""
        return f"{self.name} ({self.dtype}, {' x '.join(map(str, self.shape)) or 'one number'})"


def find(*namespaces: Mapping[str, Any]) -> dict[int, Block]:
    """Return what these names hold, directly or not.

    Args:
        namespaces: Names and values; of two names for the same memory the one that is found first, and the shorter,
            counts. A search that takes too long ends with what it has.

    Returns:
        Blocks by address.
    """
    found: dict[int, Block] = {}
    seen: set[int] = set()
    todo: deque[tuple[str, Any, int]] = deque((name, value, 0) for space in namespaces for name, value in space.items())
    deadline = time.monotonic() + _SECONDS
    while todo and time.monotonic() < deadline:
        name, value, depth = todo.popleft()
        if id(value) in seen or isinstance(value, _OPAQUE):
            continue
        seen.add(id(value))
        _take(found, name, value)
        if depth < _DEPTH:
            todo.extend((part, held, depth + 1) for part, held in _held_by(name, value))
    return found


def nameless() -> dict[int, Block]:
    """Return tensors that Python knows of, whoever holds them. Walks all objects: 0.1 s or more."""
    found: dict[int, Block] = {}
    tensor = _tensor_class()
    for value in gc.get_objects():
        if tensor is not None and issubclass(type(value), tensor):
            _take(found, "a tensor without a name", value)
    return found


def largest(blocks: Iterable[Block], device: str, count: int = 3) -> list[Block]:
    """Return those of a device ("cpu", "cuda:0") that take the most."""
    return sorted((block for block in blocks if block.device == device), key=lambda block: -block.size)[:count]


def address_of(value: Any) -> tuple[int, Block] | None:
    """Return where a tensor's storage is, and what it is; None for one without, such as a sparse one or a wrapper."""
    try:
        return _of_tensor("", value)
    except Exception:  # each kind of tensor without storage raises something else
        return None


def _take(found: dict[int, Block], name: str, value: Any) -> None:
    """Note what a value is itself, if it is a tensor or an array."""
    tensor = _tensor_class()
    try:
        if tensor is not None and issubclass(type(value), tensor):
            address, block = _of_tensor(name, value)
        elif type(value).__module__ == "numpy" and type(value).__name__ == "ndarray":
            address, block = _of_array(name, value)
        else:
            return
    except Exception:  # a tensor without storage: a sparse one, or a wrapper
        return
    if block.size and block.device != "meta":
        found.setdefault(address, block)


def _of_tensor(name: str, value: Any) -> tuple[int, Block]:
    value = getattr(value, "_local_tensor", value)  # of a DTensor
    storage = value.untyped_storage()
    dtype = str(value.dtype).removeprefix("torch.")
    block = Block(name, storage.nbytes(), str(value.device), tuple(value.shape), dtype)
    return storage.data_ptr() or id(storage), block


def _of_array(name: str, value: Any) -> tuple[int, Block]:
    owner = value
    while type(owner.base) is type(value):
        owner = owner.base
    return owner.ctypes.data, Block(name, owner.nbytes, "cpu", value.shape, str(value.dtype))


def _held_by(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    tensor = _tensor_class()
    if tensor is not None and issubclass(type(value), tensor):
        yield f"{name}.grad", value.grad if value.is_leaf else None
        return
    if isinstance(value, dict):
        for key, held in list(value.items())[:_WIDTH]:
            yield f"{name}[{key!r}]" if isinstance(key, (str, int)) else f"{name}[...]", held
    elif isinstance(value, (list, tuple, set, frozenset, deque)):
        for number, held in enumerate(list(value)[:_WIDTH]):
            yield f"{name}[{number}]", held
    else:
        yield from _attributes(name, value)


def _attributes(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield what an object has in its `__dict__`; parts of a module under the names that its own code uses."""
    try:
        held = object.__getattribute__(value, "__dict__")
    except AttributeError:  # it has slots
        return
    for attribute, part in list(held.items())[:_WIDTH]:
        if attribute in ("_parameters", "_buffers", "_modules") and isinstance(part, dict):
            for key, member in part.items():
                yield f"{name}.{key}", member
        else:
            yield f"{name}.{attribute}", part


def _tensor_class() -> type | None:
    torch = sys.modules.get("torch")
    return torch.Tensor if torch is not None else None
