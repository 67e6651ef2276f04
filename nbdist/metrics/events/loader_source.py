"""What a DataLoader reads and how, for advice on it after its loop, though the loop has made it for itself.

Owns what is kept alive for that: nothing that is large, on a GPU, or waited for by others to end. The DataLoader, its
iterator and its workers never are.
"""

from __future__ import annotations

import functools
import gc
import sys
import types
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

import torch

LIMIT = 64 << 20  # bytes of all that is kept for the advice on a cell
_OBJECTS = 10_000  # that are looked at before something is kept; more of them take too long
_LOOKS = 16  # in a cell
_HEAP_TYPE = 1 << 9  # of `__flags__`: a class, as a `class` statement makes it
_NO_WEIGHT = (types.ModuleType, type, types.BuiltinFunctionType, types.CodeType)  # there anyway
_PLAIN = (int, float, complex, str, bytes, bytearray, list, tuple, dict, set, frozenset, range, slice, type(None))
_CALLABLE = (types.MethodType, types.CellType, functools.partial, types.MappingProxyType)


@dataclass(frozen=True)
class LoaderSource:
    """What a DataLoader reads and how; its attributes have the names of the DataLoader's.

    Attributes:
        dataset: Its dataset.
        collate_fn: Makes a batch of items.
        batch_size: Items of a batch, 1 if that is not known; None: it gives items one by one.
        persistent_workers: As given.
        prefetch_factor: As given.
        pin_memory: As given, where there is a GPU.
    """

    dataset: Any
    collate_fn: Callable[[Any], Any]
    batch_size: int | None
    persistent_workers: bool
    prefetch_factor: int | None
    pin_memory: bool
    batch_sampler: None = None


class SourceReference:
    """Refers to the source of an iterator's batches without keeping it alive, until `keep` finds that to be harmless.

    Args:
        iterator: Of a DataLoader.
        batch_size: Items of a batch; 0: not known.
    """

    def __init__(self, iterator: Any, batch_size: int) -> None:
        self._read: Callable[[], Any] = _weakly(iterator._dataset)
        self._is_known = self._read() is not None
        self._collate: Callable[[], Any] = _weakly(iterator._collate_fn)
        self._batch_size = batch_size or 1 if getattr(iterator, "_auto_collation", True) else None
        self._persistent = bool(getattr(iterator, "_persistent_workers", False))
        self._prefetch: int | None = getattr(iterator, "_prefetch_factor", None)
        self._pinned = bool(getattr(iterator, "_pin_memory", False))

    def is_of(self, iterator: Any) -> bool:
        """Return whether an iterator reads the same dataset."""
        return self._read() is getattr(iterator, "_dataset", None)

    @property
    def has_ended(self) -> bool:
        """Whether the dataset is known to be gone."""
        return self._is_known and self._read() is None

    def keep(self, iterator: Any, limit: int) -> int:
        """Keep the dataset and what makes batches, each if that is harmless.

        Args:
            iterator: The one that this was made of, or another of the same dataset.
            limit: Bytes that they may take.

        Returns:
            Bytes that they take.
        """
        kept = 0
        dataset, collate = iterator._dataset, iterator._collate_fn
        if (weight := weight_of(dataset, limit)) is not None:
            self._read, kept = lambda: dataset, weight
        if (weight := weight_of(collate, limit - kept)) is not None:
            self._collate, kept = lambda: collate, kept + weight
        return kept

    def source(self) -> LoaderSource | None:
        """Return what the batches came from; None if it is gone."""
        dataset, collate = self._read(), self._collate()
        if dataset is None or collate is None:
            return None
        return LoaderSource(dataset, collate, self._batch_size, self._persistent, self._prefetch, self._pinned)


class KeptSources:
    """What is kept alive for the advice on one cell: within a limit for all of its DataLoaders together."""

    def __init__(self) -> None:
        self._left, self._looks = LIMIT, _LOOKS

    def keep(self, reference: SourceReference, iterator: Any) -> None:
        """Keep what an iterator reads, if that is harmless and the limit allows it."""
        if self._looks:
            self._looks -= 1
            self._left -= reference.keep(iterator, self._left)


def weight_of(value: Any, limit: int) -> int | None:
    """Return the bytes that a value and all that it refers to take.

    Returns:
        None: more than the limit, not known, or the value should not be kept: part of it is on a GPU, or something
        happens when it ends, as with files, processes and temporary folders.
    """
    seen: set[int] = set()
    todo, weight = [value], 0
    while todo:
        value = todo.pop()
        if id(value) in seen or isinstance(value, _NO_WEIGHT):
            continue
        seen.add(id(value))
        own = _own_weight(value)
        if own is None or (weight := weight + own) > limit or len(seen) > _OBJECTS:
            return None
        todo += _held_by(value)
    return weight


def _own_weight(value: Any) -> int | None:
    kind = type(value)
    if kind in _PLAIN:
        return sys.getsizeof(value)
    if hasattr(kind, "__del__") or any(reference.__callback__ is not None for reference in weakref.getweakrefs(value)):
        return None
    if isinstance(value, torch.Tensor):
        is_plain = kind in (torch.Tensor, torch.nn.Parameter) and value.layout == torch.strided
        on_host = is_plain and value.device.type == "cpu" and value.grad_fn is None and value.grad is None
        return value.untyped_storage().nbytes() if on_host else None
    if _is_array(value):
        return None if value.dtype.hasobject else int(value.nbytes)
    if isinstance(value, (types.FunctionType, PurePath, *_CALLABLE)) or kind.__flags__ & _HEAP_TYPE:
        return object.__sizeof__(value)
    return None


def _held_by(value: Any) -> Iterable[Any]:
    """Return what a value refers to; of a function, not the module's names."""
    if isinstance(value, types.FunctionType):
        return [value.__closure__, value.__defaults__, value.__kwdefaults__, vars(value)]
    if isinstance(value, (torch.Tensor, str, bytes)):
        return []
    if _is_array(value):
        return [value.base]
    return gc.get_referents(value)


def _is_array(value: Any) -> bool:
    return (type(value).__module__, type(value).__name__) == ("numpy", "ndarray")


def _weakly(value: Any) -> Callable[[], Any]:
    try:
        return weakref.WeakMethod(value) if isinstance(value, types.MethodType) else weakref.ref(value)
    except TypeError:  # a list, for example
        return lambda: None
