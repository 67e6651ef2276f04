"""`torch.multiprocessing.spawn` on a rank: what can't work fails at once, and what does is not part of the session."""

from __future__ import annotations

import functools
import importlib
import os
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from nbdist.errors import UsageError


def install(
    is_main: Callable[[Any], bool],
    own_store: Callable[[], AbstractContextManager[None]],
    own_meeting_point: Callable[[], AbstractContextManager[None]],
    company: Callable[[], int],
) -> None:
    """Make spawning a function that new processes can't import raise, instead of failing once they have imported torch.

    What is spawned is not part of the session, and a line says so where several ranks do it.

    Args:
        is_main: Whether a function belongs to `__main__`: to a cell, or to a file that `%run` runs or has run.
        own_store: In its body, processes are forked that serve the store of their group, which nobody else does.
        own_meeting_point: In its body, processes are spawned that do so, and are not to meet at the rank's address.
        company: The number of ranks that run what runs now.
    """
    module: Any = importlib.import_module("torch.multiprocessing.spawn")  # the package has a function of this name
    package: Any = importlib.import_module("torch.multiprocessing")
    original = module.start_processes

    @functools.wraps(original)
    def start_processes(fn: Any, *args: Any, **kwargs: Any) -> Any:
        method = kwargs.get("start_method", args[4] if len(args) > 4 else "spawn")
        if method != "fork" and is_main(fn) and not _is_of_running_file(fn):
            raise UsageError(_advice(fn))
        if company() > 1:
            print(_notice(fn, kwargs.get("nprocs", args[1] if len(args) > 1 else 1)), flush=True)
        with own_store() if method == "fork" else own_meeting_point():
            return original(_apart(fn) if method == "fork" else fn, *args, **kwargs)

    module.start_processes = package.start_processes = start_processes


def _apart(function: Any) -> Any:
    """Return a function for forked processes: they inherit the rank's group, whose connections are the rank's alone."""

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        groups: Any = importlib.import_module("torch.distributed").group
        groups.WORLD = None
        return function(*args, **kwargs)

    return run


def _notice(function: object, count: int) -> str:
    name = getattr(function, "__name__", "the function")
    started = "1 process" if count == 1 else f"{count:,} processes"
    return (
        f"nbdist: mp.spawn starts {started} on each rank. To use the ranks themselves, call `{name}(rank, ...)` on "
        "them; to start these processes once, run this on one rank, with `%%rank 0`"
    )


def _is_of_running_file(function: object) -> bool:
    """Return whether a function is one of a file that runs as the main program, which new processes read again."""
    main = sys.modules.get("__main__")
    name = getattr(function, "__name__", "")
    return getattr(main, "__file__", None) is not None and getattr(main, name, None) is function


def _advice(function: object) -> str:
    name = getattr(function, "__name__", "the function")
    path = getattr(getattr(function, "__code__", None), "co_filename", "")
    where, instead = "in a cell", "move the function to a .py file"
    if os.path.isfile(path):
        program = os.path.basename(path)
        where = f"in {program}, which was run as a program and has ended"
        instead = f"import it: `from {program.removesuffix('.py')} import {name}`"
    return (
        f"mp.spawn can't run {name!r}: it is defined {where}, and new processes import their functions from files. "
        f"This process is a rank already: call `{name}(...)` here, or `nbdist.notebook_launcher({name}, ...)` in the "
        f"notebook, or {instead}."
    )
