"""Forks whose child really runs, on Pythons where it may not.

CPython before 3.10.15 and 3.11.10 takes the lock on its list of threads in the child before it makes that lock again
(gh-112275). If another thread holds it at the fork, the child waits forever: gloo's threads do, for a moment after each
collective, when they free its tensors. A DataLoader then waits for a worker that never begins.
"""

from __future__ import annotations

import contextlib
import functools
import os
import select
import signal
import sys
from collections.abc import Callable, Iterator

_FIRST_LIMIT = 1.0  # seconds for the child to begin; twice as many at each further try, as a slow machine may need


def mend() -> None:
    """Have `os.fork` in this process try again when the child is stuck. Does nothing where Python does not need it."""
    if is_needed(sys.version_info[:3]) and getattr(os.fork, "func", None) is not fork_until_it_runs:
        os.fork = functools.partial(fork_until_it_runs, os.fork)


@contextlib.contextmanager
def mended() -> Iterator[None]:
    """Mend forks like `mend`, until the end of the block: for a process that is not ours, such as a notebook's."""
    fork = os.fork
    mend()
    try:
        yield
    finally:
        os.fork = fork


def is_needed(version: tuple[int, ...]) -> bool:
    """Return whether a child may be stuck with this version of Python."""
    return version < (3, 10, 15) or (3, 11) <= version < (3, 11, 10)


def fork_until_it_runs(fork: Callable[[], int], limit: float = _FIRST_LIMIT) -> int:
    """Fork, and again if the child does not begin.

    A stuck child has run no line of Python yet, so it can be killed and nothing is lost.

    Args:
        fork: What forks, as `os.fork` does.
        limit: Seconds that the first child has to begin.

    Returns:
        The child's process id; in the child 0.

    Raises:
        OSError: The system has no room for another process, or this one for two more descriptors.
    """
    while True:
        reading, writing = os.pipe()
        child = fork()
        if child == 0:
            os.close(reading)
            os.write(writing, b"1")
            os.close(writing)
            return 0
        os.close(writing)
        try:
            if _is_heard(reading, limit) or _was_slow(child, reading):
                return child
        except BaseException:  # an interrupt: nobody will learn of this child
            _kill(child)
            raise
        finally:
            os.close(reading)
        _kill(child)
        limit *= 2


def _is_heard(reading: int, limit: float) -> bool:
    """Return whether the child has written, or has ended, which its parent will see."""
    poll = select.poll()
    poll.register(reading, select.POLLIN)
    return bool(poll.poll(1000 * limit))


def _was_slow(child: int, reading: int) -> bool:
    """Return whether the child has just begun. It is held meanwhile, so that a running one isn't taken for stuck."""
    with contextlib.suppress(ProcessLookupError, ChildProcessError):  # it has ended, and SIGCHLD is ignored
        os.kill(child, signal.SIGSTOP)
        os.waitid(os.P_PID, child, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
    if not _is_heard(reading, 0):
        return False
    with contextlib.suppress(ProcessLookupError):
        os.kill(child, signal.SIGCONT)
    return True


def _kill(child: int) -> None:
    with contextlib.suppress(ProcessLookupError, ChildProcessError):  # SIGCHLD is ignored: nobody has to wait
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
