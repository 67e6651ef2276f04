"""What is in a value, read without running its code, and how it is written: `state['layer.weight']`, `model.head`.

An object of a class in Python is what it has stored, whatever its class says of it. What code in C keeps is read only
of types that are known exactly; `isinstance` would ask an object for its `__class__`, which may be a property.
"""

from __future__ import annotations

import abc
import ast
import collections
import dataclasses
import datetime
import decimal
import enum
import functools
import pathlib
import re
import sys
import types
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import lru_cache
from itertools import islice
from typing import Any

BASIC = (bool, int, float, complex, str, bytes, type(None))
_DICTS = (dict, collections.OrderedDict, collections.defaultdict)
_IN_C = (types.WrapperDescriptorType, types.MethodDescriptorType, types.ClassMethodDescriptorType)
_WRITTEN: tuple[type, ...] = (range, slice, type(...), type(NotImplemented), bytearray, decimal.Decimal)
_WRITTEN += (datetime.date, datetime.datetime, datetime.time, datetime.timedelta, datetime.timezone)
_PATHS = (pathlib.PosixPath, pathlib.PurePosixPath, pathlib.WindowsPath, pathlib.PureWindowsPath)
# What makes a loader's batches. The rest is how it makes them, or follows from these.
_OF_LOADER = ("batch_size", "drop_last", "sampler", "batch_sampler", "dataset", "collate_fn")
# What a sampler draws from is the loader's, too; a rank, and how many batches it has been asked for, differ by design.
_NOT_OF_SAMPLER = ("data_source", "dataset", "rank")
_MOST = 30_000  # entries of a container that are read: more than are hashed
_WALKED = 10_000  # values that are walked through in search of tensors
_LONG = 200  # characters of a key that is written in a path


def contents_of(value: Any) -> list[tuple[Any, Any]] | None:
    """Return keys and values of what a value holds; None: it is not looked into."""
    kind = type(value)
    if kind is list or kind is tuple:
        return list(islice(enumerate(value), _MOST))
    if is_plain(value):
        return list(islice(value.items(), _MOST))
    if kind.__bases__ == (tuple,) and type(kind.__dict__.get("_fields")) is tuple:  # a named tuple
        return list(zip(kind.__dict__["_fields"], tuple.__iter__(value), strict=False))
    held = _attributes(value)
    if held is None:
        return None
    if is_module(value):
        return list(_of_module(held))
    if _is_optimizer(value):
        return _of_optimizer(held)
    if _is_loader(value):
        return [(name, held[name]) for name in _OF_LOADER if name in held]
    if _is_sampler(value):
        return sorted((name, each) for name, each in held.items() if name not in _NOT_OF_SAMPLER)
    if "__dataclass_fields__" in kind.__dict__:
        names = [field.name for field in dataclasses.fields(kind)]
        return [(name, held[name]) for name in names] if all(name in held for name in names) else None
    return _stored(value, held)


def entries_of(value: object) -> list[tuple[str, Any]]:
    """Return what a value holds, by what is written after its name: "['lr']", ".weight"; empty: nothing is read."""
    contents = contents_of(value) or []
    if not is_plain(value):
        return [(_written(key), each) for key, each in contents]
    return [(f"[{key!r}]", each) for key, each in contents] if has_entries(value, contents) else []


def has_entries(value: object, contents: list[tuple[Any, Any]]) -> bool:
    """Return whether there are entries of a value, of which these are the contents."""
    return bool(contents) and (not _is_dict(value) or all(_is_literal(key) for key, _ in contents))


def find(names: Mapping[str, Any], path: str) -> Any:
    """Return the value at a path.

    Raises:
        KeyError: There is none, or this is not a path.
    """
    try:
        tree = ast.parse(path.strip(), mode="eval").body
        steps: list[tuple[bool, Any]] = []  # whether it is an attribute, and the key
        while not isinstance(tree, ast.Name):
            if isinstance(tree, ast.Attribute):
                steps.append((True, tree.attr))
            elif isinstance(tree, ast.Subscript):
                steps.append((False, ast.literal_eval(tree.slice)))
            else:
                raise KeyError(path)
            tree = tree.value
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        raise KeyError(path) from None
    value = names[tree.id]
    for attribute, key in reversed(steps):
        value = _entry(value, attribute, key)
    return value


def _entry(value: object, attribute: bool, wanted: object) -> Any:
    contents = contents_of(value) or []
    if not is_plain(value):
        wanted = str(wanted)  # `layers[0]` is the child "0"
    elif attribute:
        raise KeyError(wanted)
    elif not _is_dict(value) and type(wanted) is int and wanted < 0:
        wanted += len(contents)
    for key, each in contents:
        if _is_literal(key) and type(key) is type(wanted) and key == wanted:
            return each
    raise KeyError(wanted)


def is_plain(value: object) -> bool:
    """Return whether this is a list, a tuple or a dict, whose entries are no attributes."""
    return type(value) is list or type(value) is tuple or _is_dict(value)


def _is_dict(value: object) -> bool:
    return any(type(value) is each for each in _DICTS)


def _written(name: str) -> str:
    if name.isidentifier():
        return f".{name}"
    return f"[{name}]" if name.isdecimal() else f"[{name!r}]"


def _is_literal(key: Any) -> bool:
    kind = type(key)
    if kind is tuple:
        return len(key) < _LONG and all(_is_literal(each) for each in key)
    if kind is str or kind is bytes:
        return len(key) < _LONG
    return any(kind is each for each in BASIC) and not (kind is int and key.bit_length() > _LONG)


def tensors_in(value: object) -> list[Any] | None:
    """Return the tensors and arrays in a value, each once; None: it holds too much to look at all of it."""
    found, seen, waiting = [], set(), [value]
    while waiting:
        each = waiting.pop()
        if any(type(each) is basic for basic in BASIC) or id(each) in seen:
            continue
        seen.add(id(each))
        if len(seen) > _WALKED:
            return None
        if tensor_of(each) is not None:
            found.append(each)
        else:
            waiting.extend(inner for _, inner in contents_of(each) or ())
    return found


# --- what torch and NumPy have


def tensor_of(value: Any) -> Any:
    """Return a tensor, the part of a sharded one that this rank has, or an array as a tensor; None: it is none."""
    torch = sys.modules.get("torch")
    if torch is None:
        return None
    kind = type(value)
    if kind is torch.Tensor or kind is torch.nn.Parameter or kind is torch.nn.Buffer:
        return value
    if is_dtensor(value):
        return value._local_tensor
    array = array_of(value)
    if array is None:
        return None
    native = array.dtype.newbyteorder("=")
    fits = array.flags.writeable and array.dtype == native and min(array.strides, default=0) >= 0
    try:
        return torch.from_numpy(array if fits else array.astype(native, order="C"))
    except TypeError:  # torch has no such dtype
        return None


def array_of(value: Any) -> Any:
    """Return an array of NumPy whose elements are no objects; None: it is none."""
    numpy = sys.modules.get("numpy")
    return value if numpy is not None and type(value) is numpy.ndarray and not value.dtype.hasobject else None


def is_dtensor(value: object) -> bool:
    """Return whether this is a tensor of which each rank has a part."""
    return type(value) is getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)


def is_module(value: object) -> bool:
    """Return whether this is a model."""
    torch = sys.modules.get("torch")
    return torch is not None and torch.nn.Module in type(value).__mro__


def _is_loader(value: object) -> bool:
    data = sys.modules.get("torch.utils.data")
    return data is not None and data.DataLoader in type(value).__mro__


def _is_sampler(value: object) -> bool:
    data = sys.modules.get("torch.utils.data")
    return data is not None and data.Sampler in type(value).__mro__


def _is_optimizer(value: object) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and torch.optim.Optimizer in type(value).__mro__


def _attributes(value: object) -> dict[str, Any] | None:
    """Return what an object has stored; None: it has no such dict, or code of its class makes one up."""
    made = next((base.__dict__["__dict__"] for base in type(value).__mro__ if "__dict__" in base.__dict__), None)
    if type(made) is not types.GetSetDescriptorType:
        return None
    held: dict[str, Any] = made.__get__(value)
    return held


def _stored(value: object, held: Mapping[str, Any]) -> list[tuple[str, Any]] | None:
    """Return the attributes of an object by name, without what it has worked out from the others; None: it has more."""
    bases = [base for base in type(value).__mro__ if base is not object]
    if type(type(value)) not in (type, abc.ABCMeta) or any(_keeps_more(base) for base in bases):
        return None
    found = dict(held)
    for base in bases:
        for name, member in base.__dict__.items():
            if type(member) is types.MemberDescriptorType:
                with suppress(AttributeError):  # a slot that is empty
                    found[name] = member.__get__(value)
            elif type(member) is functools.cached_property:
                found.pop(name, None)
    return sorted((name, each) for name, each in found.items() if type(name) is str)


@lru_cache(maxsize=4096)
def _keeps_more(base: type) -> bool:
    """Return whether a class is made by code in C, which may keep what is not an attribute."""
    for name, member in base.__dict__.items():
        if type(member) is types.GetSetDescriptorType and name not in ("__dict__", "__weakref__"):
            return True
        if type(member) in _IN_C or (name == "__new__" and type(member) is types.BuiltinFunctionType):
            return True
    return False


def _of_module(held: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield parameters, buffers and child modules by name, from the dicts that a module keeps them in."""
    for group in ("_parameters", "_buffers", "_modules"):
        yield from ((name, each) for name, each in list(held.get(group, {}).items()) if each is not None)


def _of_optimizer(held: Mapping[str, Any]) -> list[tuple[str, Any]] | None:
    """Return what its state_dict has, parameters by their number: the model has their values."""
    groups, state = held.get("param_groups"), held.get("state", 0)
    if type(groups) is not list or not _is_dict(state) or any(type(group) is not dict for group in groups):
        return None
    numbers = {id(param): number for number, param in enumerate(each for group in groups for each in group["params"])}
    options = [{key: each for key, each in group.items() if key != "params"} for group in groups]
    return [
        ("param_groups", options),
        ("state", {numbers[id(param)]: each for param, each in state.items() if id(param) in numbers}),
    ]


# --- types in C that say what they are


def known_state(value: Any) -> Any:
    """Return plain values that say what an object of a known type in C is; None: it is of no such type."""
    kind = type(value)
    if kind in _WRITTEN:
        return repr(value)
    if kind is collections.deque:
        return [value.maxlen, list(value)]
    if kind is functools.partial:
        return [value.func, list(value.args), value.keywords, value.__dict__]
    if kind is types.MethodType:
        return [value.__func__, value.__self__]
    if kind is types.FunctionType:
        return [value.__module__, value.__qualname__, *_of_code(value.__code__)]
    if kind is types.BuiltinFunctionType:
        return [value.__module__, value.__qualname__]
    if kind is re.Pattern:
        return [value.pattern, value.flags]
    if kind in _PATHS:
        return str(value)
    if kind is types.ModuleType:
        return value.__name__
    if kind in (type, abc.ABCMeta, enum.EnumMeta):
        return [value.__module__, value.__qualname__]
    if type(kind) is enum.EnumMeta:
        return [object.__getattribute__(value, name) for name in ("_name_", "_value_")]
    return _of_torch_or_numpy(value)


def _of_code(code: types.CodeType) -> list[Any]:
    constants = [_of_code(each) if type(each) is types.CodeType else each for each in code.co_consts]
    return [code.co_code, code.co_names, constants]


def _of_torch_or_numpy(value: Any) -> Any:
    torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")
    kind = type(value)
    if torch is not None and kind in (torch.dtype, torch.device, torch.Size):
        return repr(value)
    if torch is not None and kind is torch.Generator:
        return value.initial_seed()
    if numpy is not None and numpy.generic in kind.__mro__ and kind.__module__ == "numpy":
        return [str(value.dtype), value.tobytes()]
    return None
