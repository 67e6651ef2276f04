"""Files by which cells and tests wait for each other, and the order of two failures."""

from __future__ import annotations

import sys
import threading
import time
import traceback
from pathlib import Path
from typing import TypeVar

E = TypeVar("E", bound=BaseException)


def await_gate(path: str) -> None:
    """Until somebody has opened it."""
    while not Path(path).exists():
        time.sleep(0.005)


def open_inside(function: str, path: str) -> None:
    """Open a gate once the main thread is inside a function of this name, which may wait there for ever."""
    threading.Thread(target=_open_inside, args=(function, path), daemon=True).start()


def _open_inside(function: str, path: str) -> None:
    while function not in _functions_of_main_thread():
        time.sleep(0.005)
    Path(path).touch()


def _functions_of_main_thread() -> list[str]:
    frame = sys._current_frames()[threading.main_thread().ident or 0]
    return [each.f_code.co_name for each, _ in traceback.walk_stack(frame)]


def opening(error: E, path: str) -> E:
    """An exception that opens a gate once a rank has noted when it was raised: what it is pickled for comes after."""
    error.__dict__["gate"] = _Gate(path)
    return error


class _Gate:
    def __init__(self, path: str) -> None:
        self._path = path

    def __reduce__(self) -> tuple[type[str], tuple[str]]:
        Path(self._path).touch()
        return str, (self._path,)
