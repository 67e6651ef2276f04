"""`torch.multiprocessing.spawn` on a rank: what can't work fails at once, with what to type instead."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

from nbdist.errors import UsageError


def refuse(is_from_cell: Callable[[Any], bool]) -> None:
    """Make spawning a function that new processes can't import raise, instead of failing once they have imported torch.

    Args:
        is_from_cell: Whether a function was defined in a cell.
    """
    module: Any = importlib.import_module("torch.multiprocessing.spawn")  # the package has a function of this name
    package: Any = importlib.import_module("torch.multiprocessing")
    original = module.start_processes

    @functools.wraps(original)
    def start_processes(fn: Any, *args: Any, **kwargs: Any) -> Any:
        method = kwargs.get("start_method", args[4] if len(args) > 4 else "spawn")
        if method != "fork" and is_from_cell(fn):
            raise UsageError(_advice(getattr(fn, "__name__", "the function")))
        return original(fn, *args, **kwargs)

    module.start_processes = package.start_processes = start_processes


def _advice(name: str) -> str:
    return (
        f"mp.spawn can't run {name!r}: it is defined in a cell, and new processes import their functions from files. "
        f"This process is a rank already: call `{name}(...)` here, or `nbdist.notebook_launcher({name}, ...)` in the "
        "notebook, or move the function to a .py file."
    )
