"""What a rank says of its variables. Reads values, and runs no code of the user's: no property, no `__repr__`.

Only types that are known exactly are looked into. CPU arrays and tensors are hashed in the thread that answers, while
the main thread waits for work.
"""

from __future__ import annotations

import hashlib
import sys
import time
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import msgspec

from nbdist.wire.held_variables import (
    Elements,
    Figures,
    Gap,
    GetElements,
    GetFigures,
    GetGap,
    GetVariables,
    Held,
    Variables,
)

_EACH = 64 << 20  # bytes of a variable that is hashed without being asked for by name
_TIME = 1.0  # seconds for all of these
_CHUNK = 64 << 20  # bytes that are copied from a GPU and hashed at once
_LEAVES = 10_000  # values in a container that is looked into
_BINS = 24
_AT_ONCE = 4 << 20  # elements whose figures are added at once
_BASIC = (bool, int, float, complex, str, bytes, type(None))
_CONTAINERS = (list, tuple, dict, set, frozenset)
_SKIPPED = (types.ModuleType, types.FunctionType, types.BuiltinFunctionType, type)

_BUSY = "a cell is running"
_UNKNOWN = "values of this type are not compared"


class _NotHashed(Exception):
    """Why a value is not hashed."""


class VariableAnswers:
    """Answers questions about the names of a shell.

    Args:
        names: Returns the namespace.
        hidden: Returns the names in it that are not the user's.
        idle: Whether the main thread waits for work.
    """

    def __init__(
        self, names: Callable[[], dict[str, Any]], hidden: Callable[[], set[str]], idle: Callable[[], bool]
    ) -> None:
        self._names = names
        self._hidden = hidden
        self._idle = idle

    def variables(self, question: GetVariables) -> Variables:
        """Return what there is."""
        known = dict(self._names())  # cells may change it meanwhile
        hidden = self._hidden()
        chosen = question.names or sorted(
            name for name, value in known.items() if not (name.startswith("_") or name in hidden or _is_skipped(value))
        )
        deadline = None if question.names else time.monotonic() + _TIME
        held = [self._held(name, known[name], deadline) for name in chosen if name in known]
        return Variables(held, not self._idle())

    def statistics(self, question: GetFigures) -> Figures:
        """Return the figures of a tensor or array.

        Raises:
            TypeError: It is none, or not of numbers.
            RuntimeError: A cell is running.
        """
        flat = self._tensor(question.name).detach().reshape(-1)
        if flat.is_complex():
            raise TypeError(f"{question.name} is complex: real numbers only")
        figures = _Sums()
        for start in range(0, flat.numel(), _AT_ONCE):
            figures.add(flat[start : start + _AT_ONCE], question.low, question.high)
        return figures.result(flat.numel())

    def elements(self, question: GetElements) -> Elements:
        """Return some elements of a tensor; raises as `statistics` does."""
        flat = self._tensor(question.name).detach().reshape(-1)
        return Elements(_bytes_of(flat[question.start : question.start + question.count]))

    def gap(self, question: GetGap) -> Gap:
        """Return how a tensor differs here from elements of another rank's; raises as `statistics` does."""
        import torch

        flat = self._tensor(question.name).detach().reshape(-1)
        theirs = torch.frombuffer(bytearray(question.data), dtype=flat.dtype)
        ours = flat[question.start : question.start + len(theirs)].cpu()
        unequal = (ours != theirs) & ~(_is_nan(ours) & _is_nan(theirs))
        places = unequal.nonzero().reshape(-1)
        if not len(places):
            return Gap(0, -1, 0.0)
        kind = torch.complex128 if flat.is_complex() else torch.float64
        gaps = (ours[places].to(kind) - theirs[places].to(kind)).abs()
        most = gaps.max().item()
        return Gap(len(places), question.start + int(places[0]), most if most == most else float("inf"))

    def _tensor(self, name: str) -> Any:
        if not self._idle():
            raise RuntimeError(_BUSY)
        value = self._names().get(name)
        tensor = _tensor_of(value)
        if tensor is None:
            raise TypeError(f"{name} is not a tensor or an array")
        return tensor

    def _held(self, name: str, value: Any, deadline: float | None) -> Held:
        held = _described(name, value)
        try:
            if not self._idle():
                raise _NotHashed(_BUSY)
            if deadline is not None and ((held.size or 0) > _EACH or time.monotonic() > deadline):
                raise _NotHashed(f"large: `%distributed variables {name}` compares it")
            return msgspec.structs.replace(held, digest=_digest(value))
        except _NotHashed as error:
            return msgspec.structs.replace(held, why=str(error))


def _is_skipped(value: Any) -> bool:
    kind = type(value)
    return any(kind is each for each in _SKIPPED) or type in kind.__mro__


def _described(name: str, value: Any) -> Held:
    kind = type(value)
    if (array := _array_of(value)) is not None:
        return Held(name, "ndarray", list(array.shape), str(array.dtype), "cpu", array.nbytes)
    if (tensor := _tensor_of(value)) is not None:
        whole = value._spec.shape if _is_dtensor(value) else tensor.shape
        form = str(tensor.dtype).removeprefix("torch.")
        size = tensor.numel() * tensor.element_size()
        return Held(name, kind.__name__, list(whole), form, str(tensor.device), size, part=_is_dtensor(value))
    if _is_module(value):
        tensors = list(_tensors_of_module(value))
        devices = sorted({str(each.device) for _, each in tensors})
        size = sum(each.numel() * each.element_size() for _, each in tensors)
        part = any(_is_dtensor(each) for _, each in tensors)
        return Held(name, kind.__name__, None, "", ", ".join(devices), size, part=part)
    if any(kind is each for each in _CONTAINERS):
        return Held(name, kind.__name__, [len(value)])
    return Held(name, kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}")


def _digest(value: Any) -> str:
    """Return a hash of a value.

    Raises:
        _NotHashed: It holds something that can't be read without running its code, or too much.
    """
    found = hashlib.blake2b(digest_size=16)
    for count, piece in enumerate(_pieces(value, frozenset())):
        if count > 4 * _LEAVES:
            raise _NotHashed(f"it holds more than {_LEAVES:,} values")
        found.update(piece)
    return found.hexdigest()


def _pieces(value: Any, above: frozenset[int]) -> Iterator[bytes]:
    """Yield bytes that say what a value is; `above`: the containers that it is in."""
    kind = type(value)
    yield f"{kind.__module__}.{kind.__qualname__};".encode()
    if any(kind is each for each in _BASIC):
        yield f"{value!r};".encode(errors="surrogatepass")
    elif (tensor := _tensor_of(value)) is not None:
        yield f"{tensor.dtype}{list(tensor.shape)};".encode()
        yield from _chunks(tensor.detach())
    elif _is_module(value):
        for name, each in _tensors_of_module(value):
            yield f"{name};".encode()
            yield from _pieces(each, above)
    elif any(kind is each for each in _CONTAINERS) and id(value) not in above:
        inside = above | {id(value)}
        yield f"{len(value)};".encode()
        if isinstance(value, Mapping):
            for key, each in list(value.items()):
                yield from _pieces(key, inside)
                yield from _pieces(each, inside)
        elif kind is set or kind is frozenset:
            yield from sorted(b"".join(_pieces(each, inside)) for each in list(value))
        else:
            for each in list(value):
                yield from _pieces(each, inside)
    else:
        raise _NotHashed(_UNKNOWN)


def _chunks(tensor: Any) -> Iterator[bytes]:
    if tensor.is_meta or tensor.is_sparse or tensor.is_quantized:
        raise _NotHashed(_UNKNOWN)
    flat = tensor.reshape(-1)
    count = max(1, _CHUNK // max(1, tensor.element_size()))
    for start in range(0, tensor.numel(), count):
        yield _bytes_of(flat[start : start + count])


def _bytes_of(tensor: Any) -> bytes:
    import torch

    data: bytes = tensor.cpu().contiguous().view(torch.uint8).numpy().tobytes()
    return data


def _tensor_of(value: Any) -> Any:
    """Return a tensor, the part of a sharded one that this rank has, or an array as a tensor; None: it is none."""
    torch = sys.modules.get("torch")
    if torch is None:
        return None
    kind = type(value)
    if kind is torch.Tensor or kind is torch.nn.Parameter or kind is torch.nn.Buffer:
        return value
    if _is_dtensor(value):
        return value._local_tensor
    array = _array_of(value)
    if array is None:
        return None
    try:
        return torch.from_numpy(array if array.flags.writeable else array.copy())
    except TypeError:  # torch has no such dtype
        return None


def _array_of(value: Any) -> Any:
    numpy = sys.modules.get("numpy")
    return value if numpy is not None and type(value) is numpy.ndarray and not value.dtype.hasobject else None


def _is_dtensor(value: Any) -> bool:
    return type(value) is getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)


def _is_module(value: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and torch.nn.Module in type(value).__mro__


def _tensors_of_module(module: Any, prefix: str = "", depth: int = 0) -> Iterator[tuple[str, Any]]:
    """Yield parameters and buffers by name, from the dicts that a module keeps them in."""
    held = object.__getattribute__(module, "__dict__")
    for group in ("_parameters", "_buffers"):
        for name, each in list(held.get(group, {}).items()):
            if _tensor_of(each) is not None:
                yield f"{prefix}{name}", each
    for name, child in list(held.get("_modules", {}).items()):
        if _is_module(child) and depth < 100:
            yield from _tensors_of_module(child, f"{prefix}{name}.", depth + 1)


def _is_nan(tensor: Any) -> Any:
    return tensor.ne(tensor)  # also of types for which torch has no `isnan`


class _Sums:
    """Figures of a tensor's elements, added piece by piece: so it takes little memory beside it."""

    def __init__(self) -> None:
        self._count, self._mean, self._squares = 0, 0.0, 0.0  # of finite elements; sum of squared deviations
        self._low: float | None = None
        self._high: float | None = None
        self._nans = self._other = self._zeros = 0  # `_other`: not finite
        self._bins: list[int] = []

    def add(self, piece: Any, low: float | None, high: float | None) -> None:
        """Add elements. `low`, `high`: the ends of the histogram; None for none."""
        import torch

        values = piece.double()
        finite = torch.isfinite(values)
        if not finite.all():
            self._nans += int(torch.isnan(values).sum())
            values = values[finite]
        self._zeros += piece.numel() - int(torch.count_nonzero(piece))
        count = values.numel()
        self._other += piece.numel() - count
        if not count:
            return
        mean = values.mean().item()
        squares = (values - mean).square_().sum().item()
        total = self._count + count
        # T. F. Chan, G. H. Golub, R. J. LeVeque, "Updating formulae and a pairwise algorithm", 1979
        self._squares += squares + (mean - self._mean) ** 2 * self._count * count / total
        self._mean += (mean - self._mean) * count / total
        self._count = total
        least, most = values.min().item(), values.max().item()
        self._low = least if self._low is None else min(self._low, least)
        self._high = most if self._high is None else max(self._high, most)
        if low is not None and high is not None:
            found = torch.histc(values, _BINS, low, high if high > low else low + 1.0).tolist()
            self._bins = [int(one + other) for one, other in zip(self._bins or [0] * _BINS, found, strict=True)]

    def result(self, count: int) -> Figures:
        """Return them. `count`: of all elements."""
        there = self._count > 0
        return Figures(
            count,
            self._low,
            self._high,
            self._mean if there else None,
            (self._squares / self._count) ** 0.5 if there else None,
            self._nans,
            self._other - self._nans,
            self._zeros,
            self._bins,
        )
