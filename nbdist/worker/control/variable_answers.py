"""What a rank says of its variables. Reads values, and runs no code of the user's: no property, no `__repr__`.

Only types that are known exactly are looked into. CPU arrays and tensors are hashed in the thread that answers, while
the main thread waits for work.
"""

from __future__ import annotations

import hashlib
import time
import types
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from typing import TYPE_CHECKING, Any

import msgspec

from nbdist.errors import UsageError
from nbdist.wire.questions.held_variables import (
    Elements,
    Entries,
    Figures,
    Gap,
    GetElements,
    GetEntries,
    GetFigures,
    GetGap,
    GetVariables,
    Held,
    Variables,
)
from nbdist.worker.control.contents import (
    BASIC,
    array_of,
    contents_of,
    entries_of,
    find,
    has_entries,
    is_dtensor,
    is_plain,
    known_state,
    tensor_of,
    tensors_in,
)

if TYPE_CHECKING:
    from torch import Tensor

_EACH = 64 << 20  # bytes of a variable that is hashed without being asked for by name
_TIME = 1.0  # seconds for all of these
_CHUNK = 64 << 20  # bytes that are copied from a GPU and hashed at once
_LEAVES = 10_000  # values in a container that is looked into
_PIECES = 10 * _LEAVES  # that are hashed of it: a few for each value
_DEEP = 30  # containers in each other that are listed one by one
_BINS = 24
_AT_ONCE = 4 << 20  # elements whose figures are added at once
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
        if question.names:
            found = [self._held(name, value, None) for name in question.names for value in _found(known, name)]
            return Variables(found, not self._idle())
        chosen = sorted(
            name for name, value in known.items() if not (name.startswith("_") or name in hidden or _is_skipped(value))
        )
        deadline = time.monotonic() + _TIME
        return Variables([self._held(name, known[name], deadline) for name in chosen], not self._idle())

    def entries(self, question: GetEntries) -> Entries:
        """Return what is in a variable, each container before its own entries.

        Raises:
            UsageError: A cell is running.
        """
        if not self._idle():
            raise UsageError(_BUSY)
        name = question.name
        inside = (held for value in _found(self._names(), name) for held in self._inside(name, value, frozenset()))
        return Entries(list(islice(inside, _LEAVES)), next(inside, None) is not None)

    def statistics(self, question: GetFigures) -> Figures:
        """Return the figures of a tensor or array.

        Raises:
            UsageError: It is none, not of real numbers, or of a layout that is not read; or a cell is running.
        """
        flat = self._tensor(question.name).detach().reshape(-1)
        if flat.is_complex():
            raise UsageError(f"{question.name} is complex: real numbers only")
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

    def _inside(self, path: str, value: object, above: frozenset[int]) -> Iterator[Held]:
        """Yield what is in a value. A container there is hashed by its keys: what they lead to follows."""
        inside = above | {id(value)}
        for written, each in entries_of(value):
            name = path + written
            if id(each) in inside or len(inside) > _DEEP or not entries_of(each):
                yield self._held(name, each, None)
            else:
                yield self._held(name, each, None, _digest_of_keys)
                yield from self._inside(name, each, inside)

    def _tensor(self, name: str) -> Any:
        if not self._idle():
            raise UsageError(_BUSY)
        tensor = next((tensor_of(value) for value in _found(self._names(), name)), None)
        if tensor is None:
            raise UsageError(f"{name} is not a tensor or an array")
        if what := _unreadable(tensor):
            raise UsageError(f"{name} is {what}")
        return tensor

    def _held(
        self, name: str, value: object, deadline: float | None, digest: Callable[[Any], str] | None = None
    ) -> Held:
        held = Held(name, _kind_of(value))
        try:
            held = _described(name, value)
            if not self._idle():
                raise _NotHashed(_BUSY)
            if deadline is not None and ((held.size or 0) > _EACH or time.monotonic() > deadline):
                raise _NotHashed(f"large: `%distributed variables {name}` compares it")
            return msgspec.structs.replace(held, digest=(digest or _digest)(value))
        except _NotHashed as error:
            return msgspec.structs.replace(held, why=str(error))
        except Exception:  # torch has layouts without these operations: one such value is not to hide all others
            return msgspec.structs.replace(held, why=_UNKNOWN)


def _found(names: Mapping[str, Any], path: str) -> list[Any]:
    """Return the value at a path, in a list; that is empty if there is none."""
    try:
        return [find(names, path)]
    except KeyError:
        return []


def _is_skipped(value: object) -> bool:
    kind = type(value)
    return any(kind is each for each in _SKIPPED) or type in kind.__mro__


def _described(name: str, value: Any) -> Held:
    kind = type(value)
    if (array := array_of(value)) is not None:
        return Held(name, "ndarray", list(array.shape), str(array.dtype), "cpu", array.nbytes)
    if (tensor := tensor_of(value)) is not None:
        whole = value._spec.shape if is_dtensor(value) else tensor.shape
        form = str(tensor.dtype).removeprefix("torch.")
        size = tensor.numel() * tensor.element_size()
        return Held(name, kind.__name__, list(whole), form, str(tensor.device), size, part=is_dtensor(value))
    is_set = kind is set or kind is frozenset
    contents = contents_of(value)
    if contents is None and not is_set:
        return Held(name, _kind_of(value))
    tensors = tensors_in(value) or []
    parts = [tensor_of(each) for each in tensors]
    return Held(
        name,
        kind.__name__,
        [len(value)] if is_set or is_plain(value) else None,
        device=", ".join(sorted({str(each.device) for each in parts})),
        size=sum(each.numel() * each.element_size() for each in parts) if parts else None,
        part=any(is_dtensor(each) for each in tensors),
        inside=has_entries(value, contents or []),
    )


def _kind_of(value: object) -> str:
    kind = type(value)
    return kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def _digest(value: object) -> str:
    """Return a hash of a value.

    Raises:
        _NotHashed: It holds something that can't be read without running its code, or too much.
    """
    found = hashlib.blake2b(digest_size=16)
    for count, piece in enumerate(_pieces(value, ())):
        if count > _PIECES:
            raise _NotHashed(f"it holds more than {_LEAVES:,} values")
        found.update(piece)
    return found.hexdigest()


def _digest_of_keys(value: object) -> str:
    keys = "".join(written for written, _ in entries_of(value))
    return hashlib.blake2b(keys.encode(errors="surrogatepass"), digest_size=16).hexdigest()


def _pieces(value: Any, above: tuple[int, ...]) -> Iterator[bytes]:
    """Yield bytes that say what a value is; `above`: the containers that it is in, from the outside in."""
    kind = type(value)
    yield f"{kind.__module__}.{kind.__qualname__};".encode()
    if kind is int:
        yield f"{value:x};".encode()  # Python writes no large ones in decimal
    elif any(kind is each for each in BASIC):
        yield f"{value!r};".encode(errors="surrogatepass")
    elif (known := known_state(value)) is not None:
        yield from _pieces(known, above)
    elif (tensor := tensor_of(value)) is not None:
        yield f"{tensor.dtype}{list(tensor.shape)};".encode()
        yield from _chunks(tensor.detach())
    elif kind is set or kind is frozenset:
        yield f"{len(value)};".encode()
        yield from sorted(b"".join(_pieces(each, above)) for each in list(value))
    elif id(value) in above:
        yield f"{above.index(id(value))};".encode()
    elif (contents := contents_of(value)) is not None:
        inside = (*above, id(value))
        yield f"{len(contents)};".encode()
        for key, each in contents:
            yield from _pieces(key, inside)
            yield from _pieces(each, inside)
    else:
        raise _NotHashed(_UNKNOWN)


def _chunks(tensor: Tensor) -> Iterator[bytes]:
    if _unreadable(tensor):
        raise _NotHashed(_UNKNOWN)
    flat = tensor.reshape(-1)
    count = max(1, _CHUNK // max(1, tensor.element_size()))
    for start in range(0, tensor.numel(), count):
        yield _bytes_of(flat[start : start + count])


def _unreadable(tensor: Tensor) -> str:
    """Return what a tensor is if its elements are not read as numbers one after the other; "": they are."""
    import torch

    if tensor.is_nested:
        return "a nested tensor"
    if tensor.is_quantized:
        return "a quantized tensor"
    if tensor.is_meta:
        return "a meta tensor, which has no values"
    if tensor.layout is torch.strided:
        return ""
    layout = str(tensor.layout).removeprefix("torch.").lstrip("_")
    kind, _, form = layout.partition("_")
    return f"a sparse ({form.upper()}) tensor" if kind == "sparse" else f"a tensor of layout {layout}"


def _bytes_of(tensor: Tensor) -> bytes:
    import torch

    data: bytes = tensor.cpu().resolve_conj().resolve_neg().contiguous().view(torch.uint8).numpy().tobytes()
    return data


def _is_nan(tensor: Tensor) -> Any:
    return tensor.ne(tensor)  # also of types for which torch has no `isnan`


class _Sums:
    """Figures of a tensor's elements, added piece by piece: so it takes little memory beside it."""

    def __init__(self) -> None:
        self._count, self._mean, self._squares = 0, 0.0, 0.0  # of finite elements; sum of squared deviations
        self._low: float | None = None
        self._high: float | None = None
        self._nans = self._other = self._zeros = 0  # `_other`: not finite
        self._bins: list[int] = []

    def add(self, piece: Tensor, low: float | None, high: float | None) -> None:
        """Add elements. `low`, `high`: the ends of the histogram; None for none."""
        import torch

        values = piece.double()
        finite = torch.isfinite(values)
        if not finite.all():
            self._nans += int(torch.isnan(values).sum())
            values = values[finite]
        self._zeros += int((values == 0).sum())
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
