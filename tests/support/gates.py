"""Files by which cells and tests wait for each other, and the order of two failures."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TypeVar

E = TypeVar("E", bound=BaseException)


def await_gate(path: str) -> None:
    """Until somebody has opened it."""
    while not Path(path).exists():
        time.sleep(0.005)


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
