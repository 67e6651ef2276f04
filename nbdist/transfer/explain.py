"""The words for what can't travel: which part of a value does not pickle, and how it is reached."""

from __future__ import annotations

import copyreg
import functools
import io
import sys
import time
import types
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from nbdist.errors import TransferError
from nbdist.transfer.parcels import torch_if_imported

_SEARCH_SECONDS = 1.0
SEARCH_OBJECTS = 100_000
_SEARCH_DEPTH = 64
_ATOMS = (int, float, complex, bool, str, bytes, type(None))


class OnGpuError(Exception):
    """A tensor on a GPU, where none may travel. Its text names the device."""


def explain(
    obj: object, name: str, culprit: object, error: Exception, pickles: Callable[[object], bool]
) -> TransferError:
    """Return the error that says why a value can't be sent.

    Args:
        obj: The value.
        name: What the user calls it.
        culprit: What the pickler took up last before the error.
        error: The error.
        pickles: Whether an object can be pickled.
    """
    if isinstance(error, RecursionError) or isinstance(error.__cause__, RecursionError):
        return TransferError(f"cannot send {quoted(name)}: it is nested too deeply to pickle; send it in parts")
    if culprit is None or pickles(culprit):
        return TransferError(
            f"cannot send {quoted(name)}: {short(error)}; send a part of it, or create it on the ranks"
        )
    path = _path(obj, name, culprit, pickles)
    subject = "it is" if path == name else f"{path} is" if path else "a part of it is"
    on_gpu = isinstance(error, OnGpuError)
    what = f"a tensor on {error}" if on_gpu else _a_type(culprit)
    found = TransferError(f"cannot send {quoted(name)}: {subject} {what}, {_why(culprit, error)}")
    found.part, found.on_gpu = f"{path or f'a part of {quoted(name)}'} is {what}", on_gpu
    return found


def find_on_gpu(obj: object, name: str) -> str:
    """Return the first tensor on a GPU that a value holds, as far as a second's search finds one.

    Args:
        obj: The value.
        name: What the user calls it.

    Returns:
        As "args[0]['x'] is a tensor on cuda:0"; empty if there is none.
    """
    torch = torch_if_imported()
    if torch is None:
        return ""
    found = ((part, path) for part, path in _walk(obj, name) if isinstance(part, torch.Tensor) and part.is_cuda)
    return next((f"{path} is a tensor on {tensor.device}" for tensor, path in found), "")


def _why(culprit: object, error: Exception) -> str:
    if isinstance(error, OnGpuError):
        return "a GPU of this process; send its `.cpu()`"
    # What Python's own types say about themselves helps nobody; other authors may have written what to do instead.
    is_pythons = type(culprit).__module__.partition(".")[0] in sys.stdlib_module_names
    if (is_pythons or isinstance(culprit, io.IOBase)) and not isinstance(culprit, (type, types.FunctionType)):
        return "which lives in one process only; send what it is made from, or create it on the ranks"
    return f"which does not pickle ({short(error)}); send what it is made from, or create it on the ranks"


def _path(root: object, name: str, culprit: object, pickles: Callable[[object], bool]) -> str | None:
    """Return the shortest way from root to the culprit, or to one like it (some are made again each time)."""
    alike: list[tuple[object, str]] = []
    for obj, path in _walk(root, name):
        if obj is culprit:
            return path
        if type(obj) is type(culprit):
            alike.append((obj, path))
    return next((path for obj, path in alike[:10] if not pickles(obj)), None)


def _walk(root: object, name: str) -> Iterator[tuple[object, str]]:
    """Yield root and what pickling would meet below it, the nearest first, as far as the limits allow."""
    yield root, name
    deadline = time.monotonic() + _SEARCH_SECONDS
    queue: deque[tuple[object, str, int]] = deque([(root, name, 0)])
    seen = {id(root): root}  # holds the objects too: an id is one object's only while it lives
    while queue:
        obj, path, depth = queue.popleft()
        for step, part in _parts(obj):
            if len(seen) > SEARCH_OBJECTS or time.monotonic() > deadline:
                return
            if id(part) in seen or type(part) in _ATOMS:
                continue
            seen[id(part)] = part
            yield part, path + step
            if depth < _SEARCH_DEPTH:
                queue.append((part, path + step, depth + 1))


def _parts(obj: object) -> Iterator[tuple[str, object]]:
    """Yield what pickling an object would take up next, with the words that lead to it."""
    if isinstance(obj, dict):
        yield from ((f"[{short(key)}]", value) for key, value in list(obj.items()))
        yield from ((f" → key {short(key)}", key) for key in list(obj))
    elif isinstance(obj, (list, tuple)):
        yield from ((f"[{index}]", item) for index, item in enumerate(obj))
    elif isinstance(obj, (set, frozenset)):
        yield from ((" → item", item) for item in list(obj))
    if type(obj) in (dict, list, tuple, set, frozenset):
        return
    if isinstance(obj, types.FunctionType):
        yield from () if _by_reference(obj) else _function_parts(obj)
    elif isinstance(obj, type):
        yield from () if _by_reference(obj) else _named(vars(obj))
    elif isinstance(obj, types.MethodType):
        yield from ((".__self__", obj.__self__), (".__func__", obj.__func__))
    elif isinstance(obj, (classmethod, staticmethod)):
        yield "", obj.__func__
    elif isinstance(obj, property):
        yield from (("", function) for function in (obj.fget, obj.fset, obj.fdel))
    elif isinstance(obj, functools.partial):
        yield from ((".func", obj.func), (".args", obj.args), (".keywords", obj.keywords))
    else:
        yield from _object_parts(obj)


def _function_parts(function: types.FunctionType) -> Iterator[tuple[str, object]]:
    code = function.__code__
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=False):
        try:
            yield f" → closure {name!r}", cell.cell_contents
        except ValueError:  # not assigned yet
            continue
    for name in _global_names(code):
        if name in function.__globals__:
            yield f" → global {name!r}", function.__globals__[name]
    defaults = function.__defaults__ or ()
    arguments = code.co_varnames[: code.co_argcount][code.co_argcount - len(defaults) :]
    named = {**dict(zip(arguments, defaults, strict=True)), **(function.__kwdefaults__ or {})}
    yield from ((f" → default of {name!r}", value) for name, value in named.items())
    yield from _named(vars(function))


def _global_names(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _global_names(constant)


def _object_parts(obj: Any) -> Iterator[tuple[str, object]]:
    torch = torch_if_imported()
    if torch is not None and isinstance(obj, torch.Tensor):
        yield from _named(vars(obj))
        return
    if torch is not None and isinstance(obj, torch.nn.Module):
        # The user's path is model.layer, not model._modules['layer'].
        for group in (obj._modules, obj._parameters, obj._buffers):
            yield from _named(group)
    try:
        reducer = copyreg.dispatch_table.get(type(obj))
        reduced = reducer(obj) if reducer else obj.__reduce_ex__(5)
    except Exception:  # what does not say what it is made of is not looked into
        return
    if not isinstance(reduced, tuple):
        return
    _, arguments, state, items, pairs = (*reduced, None, None, None)[:5]
    states = state if isinstance(state, tuple) and len(state) == 2 else (state,)
    for part in states:
        yield from _named(part) if isinstance(part, dict) else [("", part)]
    yield from (("", argument) for argument in arguments)
    for index, item in enumerate(items or ()):
        yield f"[{index}]", item
    for key, value in pairs or ():
        yield f"[{short(key)}]", value


def _named(attributes: Any) -> Iterator[tuple[str, object]]:
    for name, value in list(attributes.items()):
        yield (f"[{name}]" if str(name).isdigit() else f".{name}"), value


def _by_reference(obj: Any) -> bool:
    """Return whether a function or class travels as a name, because the other process can import it."""
    if obj.__module__ == "__main__" or obj.__module__ not in sys.modules:
        return False
    found: Any = sys.modules[obj.__module__]
    for name in obj.__qualname__.split("."):
        found = getattr(found, name, None)
    return found is obj


def _a_type(obj: object) -> str:
    kind = type(obj)
    home = "" if kind.__module__ in ("builtins", "__main__") else f"{kind.__module__}."
    name = home + kind.__qualname__
    return f"{'an' if name[0] in 'aeiouAEIOU' else 'a'} {name}"


def quoted(name: str) -> str:
    """Return a variable's name in quotes; words as they are."""
    return name if " " in name else repr(name)


def short(value: object) -> str:
    """Return a value or an exception in one line of bounded length."""
    try:
        text = f"{type(value).__name__}: {value}" if isinstance(value, Exception) else repr(value)
    except Exception:  # a __repr__ or __str__ of somebody's own
        text = f"<{type(value).__name__}>"
    return text if len(text) <= 120 else text[:117] + "..."
