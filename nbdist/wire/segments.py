"""Memory of one process that others of its machine can map: a memfd, written once, then sealed.

Independent of what lies in it.
"""

from __future__ import annotations

import fcntl
import os

from nbdist.wire.base.parcel import Segment


class Unreachable(Exception):
    """A segment can't be opened, and why."""


def create() -> int:
    """Make an empty one, and return its descriptor."""
    return os.memfd_create("nbdist", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)


def seal(descriptor: int) -> None:
    """Let nobody change it any more: what receivers do not copy stays as it is."""
    seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SEAL
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)


def segment_of(descriptor: int) -> Segment:
    """Describe one of this process's, so that others can open it."""
    status = os.fstat(descriptor)
    return Segment(os.getpid(), descriptor, status.st_ino, status.st_size)


def open_segment(segment: Segment) -> int:
    """Open another process's, and return a descriptor of our own.

    Raises:
        Unreachable: It is not there any more.
    """
    try:
        # Not blocking: should the descriptor be a named pipe by now, opening it would wait for a writer.
        path = f"/proc/{segment.pid}/fd/{segment.fd}"
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        gone = not os.path.exists(f"/proc/{segment.pid}")
        what = "has ended" if gone else f"does not hold it open for this process ({error.strerror})"
        raise Unreachable(f"the process that sent it ({segment.pid}) {what}") from error
    status = os.fstat(descriptor)
    if (status.st_ino, status.st_size) == (segment.inode, segment.size):
        return descriptor
    os.close(descriptor)
    raise Unreachable(
        f"the process that sent it ({segment.pid}) has released it, its descriptor {segment.fd} is another file now"
    )
