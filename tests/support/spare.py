"""Kernels with ranks that tests hand on to each other: a new one imports torch, which takes longer than most tests."""

from __future__ import annotations

import contextlib
import queue
from collections.abc import Iterator

import psutil

from testbed.kernel import Kernel
from tests.support.leftovers import files_of_sessions, spare_files
from tests.support.roles import MODULES

_AS_NEW = "__import__('tests.support.as_new').support.as_new"
_PATIENCE = 10.0  # seconds that a kernel which a test has left at work has to end that

_spare: Kernel | None = None


@contextlib.contextmanager
def spare_with_ranks(count: int = 2, options: str = "") -> Iterator[Kernel]:
    """A kernel with a new session, in which no user has typed anything: one from before if it is as it was new."""
    global _spare
    others = files_of_sessions()
    kernel, _spare = _spare, None
    spare_files.clear()
    try:
        if kernel is None:
            kernel = Kernel()
            kernel.ok("%load_ext nbdist")
            kernel.ok(f"%distributed start -n {count} {options}")
            kernel.value(f"{_AS_NEW}.remember()")
        else:
            kernel.ok(f"%distributed start -n {count} {options}")
            kernel.value(f"{_AS_NEW}.changes()")  # the next cell is the first
        yield kernel
    finally:
        if kernel is not None:
            _hand_on(kernel, others)


def close_spare() -> None:
    """Nobody needs one any more."""
    global _spare
    kernel, _spare = _spare, None
    spare_files.clear()
    if kernel is not None:
        kernel.close()


def processes_of_spare() -> set[int]:
    """Those of the kernel that waits for its next test."""
    return {_spare.pid, *_below(_spare)} if _spare is not None else set()


def _hand_on(kernel: Kernel, files_of_others: set[str]) -> None:
    global _spare
    if _spare is None and _is_as_new(kernel):
        _spare = kernel
        spare_files.update(files_of_sessions() - files_of_others)
    else:
        kernel.close()


def _is_as_new(kernel: Kernel) -> bool:
    """Whether nothing of its tests is left, once their session has ended."""
    if not kernel.manager.is_alive() or kernel.pid != kernel.manager.provisioner.process.pid:  # type: ignore[union-attr]
        return False
    try:
        if kernel.value(f"{_AS_NEW}.changes()", _PATIENCE):
            return False
        kernel.ok("%distributed stop", _PATIENCE)
    except (AssertionError, TimeoutError, queue.Empty):
        return False
    commands = [" ".join(psutil.Process(pid).cmdline()) for pid in _below(kernel)]
    return len(commands) == len(MODULES) and all(any(name in each for each in commands) for name in MODULES.values())


def _below(kernel: Kernel) -> list[int]:
    try:
        return [process.pid for process in psutil.Process(kernel.pid).children(recursive=True)]
    except psutil.NoSuchProcess:
        return []
