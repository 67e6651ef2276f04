"""Small source trees that go to other machines before a node starts there, by rsync over ssh.

To the same path as here. Nothing is ever removed there.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass

from nbdist.base.text import counted, size
from nbdist.errors import UsageError

LIMIT = 64 << 20  # bytes of all trees together: source code is smaller, and data has better ways
_MOST_FILES = 20_000
_LEFT_OUT = (".git", "__pycache__", "*.pyc", ".ipynb_checkpoints")
# Links that lead out of a tree become what they lead to. Owners stay those of who copies.
_RSYNC = [
    *("rsync", "--recursive", "--links", "--copy-unsafe-links", "--perms", "--times"),
    *(f"--exclude={name}" for name in _LEFT_OUT),
]


@dataclass(frozen=True)
class Tree:
    """A folder and what of it would be copied. size: in bytes."""

    path: str
    files: int
    size: int

    def __str__(self) -> str:
        return f"{self.path} ({counted(self.files, 'file')}, {size(self.size)})"


def look_at(paths: Sequence[str]) -> list[Tree]:
    """Look at the folders to copy. Copies nothing.

    Args:
        paths: The folders.

    Raises:
        UsageError: They can't be copied.
    """
    if not paths:
        return []
    if shutil.which("rsync") is None:
        raise UsageError(
            "--sync needs `rsync`, here and on the other machines: install it (Debian: rsync), or leave it out"
        )
    trees: list[Tree] = []
    for path in paths:
        if not os.path.isabs(path):
            raise UsageError(f"sync: {path!r} is not an absolute path: profiles and Python need one that begins with /")
        if not os.path.isdir(path):
            raise UsageError(f"sync: folder {path} does not exist")
        left = LIMIT - sum(tree.size for tree in trees), _MOST_FILES - sum(tree.files for tree in trees)
        trees.append(_look_at(os.path.normpath(path), *left))
    return trees


def _look_at(path: str, most: int, most_files: int) -> Tree:
    """Ask rsync what it would copy to an empty folder."""
    files = total = 0
    with tempfile.TemporaryDirectory(prefix="nbdist-") as nowhere:
        command = [*_RSYNC, "--dry-run", "--out-format=%i %l", f"{path}/", nowhere]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as rsync:
            assert rsync.stdout is not None
            for line in rsync.stdout:
                kind, _, length = line.strip().rpartition(" ")
                if kind.startswith(">f"):
                    files, total = files + 1, total + int(length)
                if total > most or files > most_files:
                    rsync.kill()
                    raise UsageError(
                        f"--sync is for source code: {size(LIMIT)} and {counted(_MOST_FILES, 'file')} at most, and "
                        f"{path} has more. Name smaller folders, or use a shared file system"
                    )
    return Tree(path, files, total)


class Copy:
    """Trees on their way to a host.

    Args:
        paths: The folders.
        host: As for ssh.
        ssh: The command that connects to it, without the host.
    """

    def __init__(self, paths: Sequence[str], host: str, ssh: Sequence[str]) -> None:
        user, at, name = host.rpartition("@")
        target = f"{user}{at}{f'[{name}]' if ':' in name else name}:/"
        command = [*_RSYNC, "--relative", "--no-implied-dirs", "-e", shlex.join(ssh), "--", *paths, target]
        self._rsync = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, cwd="/"
        )

    def failure(self) -> str:
        """Wait for the end, and return why it has failed; "" if it has not."""
        said = self._rsync.communicate()[1].strip().splitlines()
        if not self._rsync.returncode:
            return ""
        return f"{said[0] if said else 'it gave no reason'} (rsync's exit code {self._rsync.returncode})"
