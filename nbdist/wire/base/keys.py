"""Keys of CurveZMQ, and the file in which the notebook finds its own."""

from __future__ import annotations

import json
import os
from pathlib import Path

import msgspec

from nbdist._version import __version__


class Home(msgspec.Struct, frozen=True):
    """Where a session runs. host: the machine's name. version: of nbdist there. kernel: whose process started it."""

    host: str
    version: str
    kernel: int

    @classmethod
    def here(cls, kernel: int = 0) -> Home:
        """Return this machine and this nbdist."""
        return cls(os.uname().nodename, __version__, kernel)


class Keys(msgspec.Struct, frozen=True):
    """Where the controller listens, and the key pair with which one kind of process may connect to it."""

    url: str
    server_key: bytes
    public_key: bytes
    secret_key: bytes


def write_key_file(path: Path, keys: Keys, home: Home) -> None:
    """Write keys, and where they open something, to a file that only its owner can read."""
    fields = {
        name: value.decode() if isinstance(value, bytes) else value
        for name, value in (msgspec.structs.asdict(keys) | msgspec.structs.asdict(home)).items()
    }
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "w") as file:
        json.dump(fields, file)


def read_key_file(path: Path) -> Keys:
    """Read keys from a file that `write_key_file` wrote."""
    fields = json.loads(path.read_text())
    return Keys(fields["url"], *(fields[name].encode() for name in ("server_key", "public_key", "secret_key")))


def read_home(path: Path) -> Home:
    """Read from a key file where its session runs: it may be on a file system that several machines share.

    Raises:
        OSError: It can't be read.
        msgspec.DecodeError: It is not a key file.
    """
    return msgspec.json.decode(path.read_bytes(), type=Home)
