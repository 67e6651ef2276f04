"""What a look asks a process of a job, and what it answers: one message each way over a socket of its own.

Both sides find each other by the folder of sockets, and by the name of the job.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import socket
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import UnionType
from typing import TypeVar

import msgspec

from nbdist.wire.questions.stopping import Flight

FOLDER_VARIABLE = "NBDIST_JOBS"  # where sockets are instead, for a job and those who look into it
_LENGTH = 4  # bytes before each message
_LARGEST = 64 << 20
M = TypeVar("M")


class LookRequest(msgspec.Struct, tag=True, frozen=True):
    """What does this process do? collectives: how many of its last ones to add; 0: none. names: whether to add them."""

    collectives: int = 0
    names: bool = False


class RankLook(msgspec.Struct, tag=True, frozen=True):
    """What a process of a job does.

    rank, world_size: as its launcher has set them. host, pid: where it is. script: its main program. since: when it
    began to answer, seconds since 1970. steps: optimizer steps since then. step_seconds: of one, over the last ones; 0:
    not known. since_step: seconds since the last one; -1: there was none. line: the user's innermost line. stack: the
    main thread's, a line per call. collective: the torch.distributed call it is in. memory: bytes of CPU memory.
    gpu_memory: in tensors; -1: it uses no GPU, or can't be asked now. paused: by a look. entered: collectives so far,
    as `entered_collectives` counts them.
    flight, names: if asked for; names: those of the user's innermost function, with short values, a line each.
    """

    rank: int
    world_size: int
    host: str
    pid: int
    script: str
    since: float
    steps: int
    step_seconds: float
    since_step: float
    line: str
    stack: str
    collective: str
    memory: int
    gpu_memory: int
    paused: bool = False
    entered: dict[str, list[int]] = {}
    flight: Flight | None = None
    names: list[str] = []


class LookFailed(msgspec.Struct, tag=True, frozen=True):
    """This process could not tell. why: in words."""

    why: str


def name_of_job(marks: Sequence[str], pid: int) -> str:
    """Return a short name for a job.

    Args:
        marks: What its processes have in common.
        pid: One of them, for a job without marks: that process alone.
    """
    text = "\n".join(marks) if any(marks) else str(pid)
    return hashlib.blake2b(text.encode(), digest_size=4).hexdigest()


def folder() -> Path:
    """Return where sockets of this user's jobs are on this machine; only the user reaches them.

    Not in TMPDIR: batch systems give each job its own.
    """
    return Path(os.environ.get(FOLDER_VARIABLE) or f"/tmp/nbdist-jobs-{os.getuid()}")


@contextlib.contextmanager
def short_path(path: Path) -> Iterator[str]:
    """Give a short name to a socket, as the system takes none of more than 107 bytes."""
    descriptor = os.open(path.parent, os.O_PATH)
    try:
        yield f"/proc/self/fd/{descriptor}/{path.name}"
    finally:
        os.close(descriptor)


def send(connection: socket.socket, message: msgspec.Struct) -> None:
    """Send a message."""
    data = msgspec.msgpack.encode(message)
    connection.sendall(len(data).to_bytes(_LENGTH, "little") + data)


def receive(connection: socket.socket, kind: type[M] | UnionType) -> M:
    """Return the message that has been sent, of this type or one of these types.

    Raises:
        OSError: The other side is gone, or late.
        msgspec.MsgspecError: It can't be read, as from another version of nbdist.
    """
    size = int.from_bytes(_exactly(connection, _LENGTH), "little")
    if size > _LARGEST:
        raise OSError(f"a message of {size:,} bytes")
    message: M = msgspec.msgpack.decode(_exactly(connection, size), type=kind)
    return message


def _exactly(connection: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        part = connection.recv(min(size - len(data), 1 << 20))
        if not part:
            raise ConnectionError("the connection ended")
        data += part
    return bytes(data)
