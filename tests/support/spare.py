"""Kernels with ranks that tests hand on to each other: a new one imports torch, which takes longer than most tests."""

from __future__ import annotations

import contextlib
import queue
from collections.abc import Iterator
from pathlib import Path

import psutil

from testbed.kernel import Kernel
from tests.support.leftovers import files_of_sessions, files_of_spares
from tests.support.roles import MODULES

_AS_NEW = "__import__('tests.support.as_new').support.as_new"
_PATIENCE = 10.0  # seconds that a kernel which a test has left at work has to end that
_MOST = 2  # kernels that wait at a time: as many as a test has side by side

_spares: list[Kernel] = []


@contextlib.contextmanager
def spare_with_ranks(count: int = 2, options: str = "") -> Iterator[Kernel]:
    """A kernel with a new session, in which no user has typed anything: one from before if it is as it was new."""
    others = files_of_sessions()
    kernel = _taken()
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


@contextlib.contextmanager
def without_session(kernel: Kernel, folder: Path) -> Iterator[Kernel]:
    """A kernel that works in a folder, without a session or a plan before and after."""
    kernel.ok("%load_ext nbdist")
    kernel.ok(f"import os, nbdist\nos.chdir({str(folder)!r})")
    yield kernel
    kernel.ok("for known in nbdist.client.session.session.known_sessions(): known.close()")
    kernel.ok("nbdist.client.start.session_plan.chosen_plan = None")


def close_spares() -> None:
    """Nobody needs them any more."""
    while (kernel := _taken()) is not None:
        kernel.close()


def processes_of_spares() -> set[int]:
    """Those of the kernels that wait for their next test."""
    return {pid for kernel in _spares for pid in (kernel.pid, *_below(kernel))}


def _taken() -> Kernel | None:
    """The kernel that has waited for the shortest time, if any waits."""
    if not _spares:
        return None
    kernel = _spares.pop()
    files_of_spares.pop(kernel.pid)
    return kernel


def _hand_on(kernel: Kernel, files_of_others: set[str]) -> None:
    if len(_spares) < _MOST and _is_as_new(kernel):
        files_of_spares[kernel.pid] = files_of_sessions() - files_of_others
        _spares.append(kernel)
    else:
        kernel.close()


def _is_as_new(kernel: Kernel) -> bool:
    """Whether nothing of its tests is left, once their session has ended."""
    if not kernel.manager.is_alive() or kernel.pid != kernel.manager.provisioner.process.pid:  # type: ignore[union-attr]
        return False
    try:
        kernel.value(f"{_AS_NEW}.await_reports()", _PATIENCE)
        kernel.run("%distributed stop", _PATIENCE)  # which fails where a test has done so
        if kernel.value(f"{_AS_NEW}.changes()", _PATIENCE):
            return False
    except (AssertionError, TimeoutError, queue.Empty):
        return False
    commands = [" ".join(psutil.Process(pid).cmdline()) for pid in _below(kernel)]
    return len(commands) == len(MODULES) and all(any(name in each for each in commands) for name in MODULES.values())


def _below(kernel: Kernel) -> list[int]:
    try:
        return [process.pid for process in psutil.Process(kernel.pid).children(recursive=True)]
    except psutil.NoSuchProcess:
        return []
