"""What is in a value, read without running its code, and how it is written: `state['layer.weight']`, `model.head`.

Only types that are known exactly are looked into; `isinstance` would ask an object for its `__class__`, which may be a
property.
"""

from __future__ import annotations

import ast
import collections
import dataclasses
import sys
import types
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

BASIC = (bool, int, float, complex, str, bytes, type(None))
_DICTS = (dict, collections.OrderedDict, collections.defaultdict)
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
    held = _attributes(value)
    if held is None:
        return None
    if is_module(value):
        return list(_of_module(held))
    if _is_optimizer(value):
        return _of_optimizer(held)
    if "__dataclass_fields__" in kind.__dict__:
        names = [field.name for field in dataclasses.fields(kind)]
        return [(name, held[name]) for name in names] if all(name in held for name in names) else None
    return None


def entries_of(value: Any) -> list[tuple[str, Any]]:
    """Return what a value holds, by what is written after its name: "['lr']", ".weight"; empty: nothing is read."""
    contents = contents_of(value) or []
    if not is_plain(value):
        return [(_written(key), each) for key, each in contents]
    return [(f"[{key!r}]", each) for key, each in contents] if has_entries(value, contents) else []


def has_entries(value: Any, contents: list[tuple[Any, Any]]) -> bool:
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


def _entry(value: Any, attribute: bool, wanted: Any) -> Any:
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


def is_plain(value: Any) -> bool:
    """Return whether this is a list, a tuple or a dict, whose entries are no attributes."""
    return type(value) is list or type(value) is tuple or _is_dict(value)


def _is_dict(value: Any) -> bool:
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


def tensors_in(value: Any) -> list[Any] | None:
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


def is_dtensor(value: Any) -> bool:
    """Return whether this is a tensor of which each rank has a part."""
    return type(value) is getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)


def is_module(value: Any) -> bool:
    """Return whether this is a model."""
    torch = sys.modules.get("torch")
    return torch is not None and torch.nn.Module in type(value).__mro__


def _is_optimizer(value: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and torch.optim.Optimizer in type(value).__mro__


def _attributes(value: Any) -> dict[str, Any] | None:
    """Return what an object has stored; None: it has no such dict, or code of its class makes one up."""
    made = next((base.__dict__["__dict__"] for base in type(value).__mro__ if "__dict__" in base.__dict__), None)
    if type(made) is not types.GetSetDescriptorType:
        return None
    held: dict[str, Any] = made.__get__(value)
    return held


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
