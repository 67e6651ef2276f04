"""A question to the NVIDIA driver by who does not keep it open. Until then only Python's own packages are needed."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Any, TypeVar

_T = TypeVar("_T")

_MIG_ENABLED = 1
PATIENCE = 2.0  # seconds that a single look waits for the driver


def within_limit(look: Callable[[], _T], otherwise: _T, limit: float | None = None) -> _T:
    """Return what a look at the driver finds, for callers that can't wait: a driver that hangs can't be interrupted.

    Args:
        look: Takes it, in a thread, which ends when the driver answers.
        otherwise: What is returned if it has not answered in time, or the look raises.
        limit: Seconds; None: 2.
    """
    found: list[_T] = []

    def take() -> None:
        with contextlib.suppress(Exception):  # no driver, or one of tomorrow that answers in ways that nobody knows
            found.append(look())

    thread = threading.Thread(target=take, name="nbdist-driver-once", daemon=True)
    thread.start()
    thread.join(PATIENCE if limit is None else limit)
    return found[0] if found else otherwise


def ask_once(question: Callable[[Any], _T], otherwise: _T, limit: float | None = None) -> _T:
    """Return the answer to a question, by callers that keep no driver open; as `within_limit`.

    Args:
        question: Called with pynvml while the driver is open.
        otherwise: What is returned without a driver, or one that does not work or answer in time.
        limit: Seconds; None: 2.
    """

    def ask() -> _T:
        import pynvml

        pynvml.nvmlInit()
        try:
            return question(pynvml)
        finally:
            pynvml.nvmlShutdown()

    return within_limit(ask, otherwise, limit)


def mig_instances(nvml: Any, handle: Any) -> list[Any] | None:
    """Return handles of the MIG instances of a GPU; None where it is not cut into instances."""
    try:
        if nvml.nvmlDeviceGetMigMode(handle)[0] != _MIG_ENABLED:
            return None
        most = int(nvml.nvmlDeviceGetMaxMigDeviceCount(handle))
    except Exception:  # older than MIG
        return None
    found = []
    for number in range(most):
        with contextlib.suppress(Exception):  # there is none of this number
            found.append(nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, number))
    return found
