"""Keys of CurveZMQ, and the file in which the notebook finds its own."""

from __future__ import annotations

import json
import os
from pathlib import Path

import msgspec


class Keys(msgspec.Struct, frozen=True):
    """Where the controller listens, and the key pair with which one kind of process may connect to it."""

    url: str
    server_key: bytes
    public_key: bytes
    secret_key: bytes


def write_key_file(path: Path, keys: Keys) -> None:
    """Write keys to a file that only its owner can read."""
    fields = {
        name: value.decode() if isinstance(value, bytes) else value
        for name, value in msgspec.structs.asdict(keys).items()
    }
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "w") as file:
        json.dump(fields, file)


def read_key_file(path: Path) -> Keys:
    """Read keys from a file that `write_key_file` wrote."""
    fields = json.loads(path.read_text())
    return Keys(fields["url"], *(fields[name].encode() for name in ("server_key", "public_key", "secret_key")))
