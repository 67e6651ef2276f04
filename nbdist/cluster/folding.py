"""One process for each node, where a launcher starts one for each rank: the first runs, the others wait for its end.

They agree by the name of a socket, which ends with its process. Independent of what runs.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import signal
import socket
from collections.abc import Callable

from nbdist.errors import UsageError

_FAILED = 1
_REFUSED = 2  # what the command exits with after a UsageError
_CODE = 16  # bytes that an exit code takes at most
_BACKLOG = 4096  # the system takes fewer
_GRACE = 5.0  # seconds for the first to end after a signal to all


class _Asked(Exception):
    """A signal asks this process to end."""


def name_of(*job: str) -> str:
    """Return the name for the processes of a job on this node.

    Args:
        job: What all of them know and no other process: where they join, with which tokens, as which node.
    """
    known = "\0".join([socket.gethostname(), *job])  # containers may share a network
    return f"\0nbdist-join-{hashlib.sha256(known.encode()).hexdigest()[:32]}"


def once(name: str, run: Callable[[], int]) -> int:
    """Call a function in the first process that gets here; in the others, wait for its end.

    Args:
        name: The same in all of them, and in no others.
        run: The function; it returns an exit code.

    Returns:
        Its exit code.

    Raises:
        UsageError: What the function has raised, in the process that has called it.
    """
    while True:
        with socket.socket(socket.AF_UNIX) as meeting:
            try:
                meeting.bind(name)
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise
            else:
                meeting.listen(_BACKLOG)
                return _run(meeting, run)
        with socket.socket(socket.AF_UNIX) as first, contextlib.suppress(ConnectionRefusedError):  # it has just ended
            first.connect(name)
            return _await_end(first)


def _await_end(first: socket.socket) -> int:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _raise)
    try:
        code = first.recv(_CODE)
    except _Asked:  # the first, too; mpirun kills it without grace once one of its processes has ended
        first.settimeout(_GRACE)
        with contextlib.suppress(TimeoutError, ConnectionResetError, _Asked):
            first.recv(_CODE)
        return 0
    except ConnectionResetError:  # it was killed before it knew of us
        code = b""
    if code:
        return int(code)
    print("the process that was this node has been killed", flush=True)
    return _FAILED


def _raise(number: int, frame: object) -> None:
    raise _Asked


def _run(meeting: socket.socket, run: Callable[[], int]) -> int:
    code = _FAILED
    try:
        code = run()
    except UsageError:
        code = _REFUSED
        raise
    finally:
        meeting.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            while True:
                _report(meeting.accept()[0], code)
    return code


def _report(other: socket.socket, code: int) -> None:
    with other, contextlib.suppress(OSError):  # it was ended meanwhile
        other.sendall(str(code).encode())
