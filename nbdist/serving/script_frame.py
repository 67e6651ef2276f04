"""Where a thread is in the user's own script: its innermost frame there, its line, and the names in it."""

from __future__ import annotations

import inspect
import linecache
import os
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

_OURS = str(Path(__file__).parents[1])
_WIDEST = 60  # characters of a line of code that are shown


def script_frames(frame: FrameType) -> Iterator[FrameType]:
    """Yield the frames of the user's own code, the innermost first."""
    others = (*{sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")}, _OURS, "<")
    current: FrameType | None = frame
    while current is not None:
        if not current.f_code.co_filename.startswith(others):
            yield current
        current = current.f_back


def script_frame(frame: FrameType) -> FrameType | None:
    """Return the innermost frame of the user's own code; None: there is none."""
    return next(script_frames(frame), None)


def script_line(frame: FrameType) -> str:
    """Return the innermost line of the user's own code, "" for none."""
    found = script_frame(frame)
    if found is None:
        return ""
    file = found.f_code.co_filename
    code = linecache.getline(file, found.f_lineno).strip()
    shown = code if len(code) <= _WIDEST else f"{code[: _WIDEST - 1]}…"
    return f"{os.path.basename(file)}:{found.f_lineno}: {shown}"


def script_place(frame: FrameType) -> str:
    """Return where a frame is, without its code: "train.py:12, in main"."""
    name = frame.f_code.co_name
    place = f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"
    return place if name.startswith("<") else f"{place}, in {name}"


def names_in(frame: FrameType) -> dict[str, Any]:
    """Return the names of a function's frame with their values; {} for the top of a module."""
    if not frame.f_code.co_flags & inspect.CO_OPTIMIZED:
        return {}
    names = dict(frame.f_locals)
    if sys.version_info < (3, 13):  # the frame keeps its snapshot, and so tensors longer than the function does
        frame.f_locals.clear()
    return names
