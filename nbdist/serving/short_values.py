"""The names of the script's innermost function with short values, as another thread may read them at any time.

Runs no code of others: only values of exactly known types are shown, tensors by shape, type and device.
"""

from __future__ import annotations

import sys
from types import BuiltinFunctionType, FrameType, FunctionType, ModuleType
from typing import Any

from nbdist.serving.script_frame import names_in, script_frame, script_place

_MOST_NAMES = 100
_MOST_ITEMS = 4  # of a list or dict that are shown
_WIDEST = 60  # characters of a text
_PLAIN = (bool, int, float, complex, type(None))
_NO_VALUES = (ModuleType, FunctionType, BuiltinFunctionType, type)  # at the top of a script: imports and definitions


def described_names(frame: FrameType) -> list[str]:
    """Return where a thread is in the user's own code, and the names there: "step = 12", a line each."""
    found = script_frame(frame)
    if found is None:
        return []
    names = names_in(found) or {
        name: value
        for name, value in list(found.f_globals.items())
        if not name.startswith("__") and not issubclass(type(value), _NO_VALUES)
    }
    lines = [f"{name} = {short_value(value)}" for name, value in list(names.items())[:_MOST_NAMES]]
    left = len(names) - len(lines)
    return [script_place(found), *lines, *([f"... and {left} more"] if left else [])]


def short_value(value: Any, *, nested: bool = False) -> str:
    """Return a value's text, or its type where its text might be long, or run code."""
    kind = type(value)
    if kind in _PLAIN:
        return _number(value)
    if kind is str:
        return repr(value if len(value) <= _WIDEST else f"{value[: _WIDEST - 1]}…")
    if kind in (list, tuple, dict) and not nested:
        return _items(value)
    return _array(value) or f"<{kind.__name__}{f' of {len(value)}' if kind in (list, tuple, dict, set) else ''}>"


def _number(value: Any) -> str:
    if type(value) is int and value.bit_length() > 256:  # Python refuses to write one of thousands of digits
        return f"<int of {value.bit_length()} bits>"
    return repr(value)


def _items(value: Any) -> str:
    more = ", …" if len(value) > _MOST_ITEMS else ""
    if type(value) is dict:
        shown = list(value.items())[:_MOST_ITEMS]
        pairs = (f"{short_value(key, nested=True)}: {short_value(each, nested=True)}" for key, each in shown)
        return f"{{{', '.join(pairs)}{more}}}"
    texts = ", ".join(short_value(each, nested=True) for each in value[:_MOST_ITEMS])
    if type(value) is list:
        return f"[{texts}{more}]"
    return f"({texts}{more}{',' if len(value) == 1 else ''})"


def _array(value: Any) -> str:
    """Return "float32[8, 16] on cuda:0" for a tensor, "int64[3]" for an array, "" for anything else."""
    torch: Any = sys.modules.get("torch")
    numpy: Any = sys.modules.get("numpy")
    known = {getattr(torch, "Tensor", None), getattr(getattr(torch, "nn", None), "Parameter", None)}
    if type(value) in known - {None}:
        sizes = [int(size) for size in value.shape]
        return f"{str(value.dtype).removeprefix('torch.')}{sizes} on {value.device}"
    if numpy is not None and type(value) is getattr(numpy, "ndarray", None):
        return f"{value.dtype}{list(value.shape)}"
    return ""
