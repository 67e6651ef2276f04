"""Checkpoints as folders: which are whole, which is the newest, how one appears all at once, how old ones go.

A checkpoint is written under `name.partial`. Its manifest, which lists all files with their sizes, comes last; then the
folder gets its name. One that it replaces waits as `name.previous` in between. So whenever a save is killed, a whole
checkpoint stays, and what is not whole can be told. Independent of ranks or of what the files hold.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from nbdist.errors import CheckpointError, UsageError

MANIFEST = "checkpoint.json"
FORMAT = 1
PARTIAL = ".partial"
_PREVIOUS = ".previous"
_LOCK = ".writing"


class Draft:
    """A checkpoint that is being written. Held by one process; the others just write into `folder`.

    Args:
        path: The name that it gets. A checkpoint of this name is replaced.

    Raises:
        UsageError: The name can't be used.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.folder = partial_folder(path)
        _refuse_name(path)
        _tidy(path)
        self.folder.mkdir(parents=True)
        # The lock goes when the process ends, however it ends: that tells a killed save from a slow one.
        self._lock = (self.folder / _LOCK).open("w")
        with contextlib.suppress(OSError):  # of file systems that know no locks
            fcntl.flock(self._lock, fcntl.LOCK_EX)

    def publish(self, manifest: Mapping[str, Any]) -> None:
        """Complete it and give it its name. It is locked until then: others would take it for a killed save."""
        files = {name: size for name, size in sorted(_sizes(self.folder).items()) if name != _LOCK}
        content = {"format": FORMAT, "saved_at": time.time(), **manifest, "files": files}
        write_durably(self.folder / MANIFEST, json.dumps(content, indent=1).encode())
        sync(self.folder)
        previous = _sibling(self.path, _PREVIOUS)
        if self.path.exists():
            self.path.rename(previous)
        self.folder.rename(self.path)
        sync(self.path.parent)
        self._release(self.path)
        if previous.exists():
            _retire(previous)

    def discard(self) -> None:
        """Remove it, as far as that can be done: it can't be used."""
        if not self._lock.closed:
            _remove(self.folder)
            self._lock.close()

    def _release(self, folder: Path) -> None:
        (folder / _LOCK).unlink(missing_ok=True)
        self._lock.close()


def partial_folder(path: Path) -> Path:
    """Return where a checkpoint is written before it gets its name."""
    return _sibling(path, PARTIAL)


def write_durably(path: Path, content: bytes) -> None:
    """Write a file so that it is there after a power failure."""
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def read_manifest(path: Path) -> dict[str, Any] | None:
    """Return what a checkpoint tells of itself; None for what is not a whole checkpoint."""
    if path.name.endswith(PARTIAL):
        return None
    try:
        content = json.loads((path / MANIFEST).read_bytes())
    except (OSError, ValueError):
        return None
    return content if isinstance(content, dict) and "files" in content else None


def check_files(path: Path, manifest: Mapping[str, Any]) -> None:
    """Check that all files of a checkpoint exist, with their sizes.

    Raises:
        CheckpointError: Some are not.
    """
    if manifest.get("format", 0) > FORMAT:
        raise CheckpointError(
            f"{path} was saved by a newer nbdist ({manifest.get('nbdist')}): upgrade nbdist to load it"
        )
    sizes = _sizes(path)
    wrong = [
        f"{name} {'is missing' if name not in sizes else f'has {sizes[name]:,} bytes instead of {size:,}'}"
        for name, size in manifest["files"].items()
        if sizes.get(name) != size
    ]
    if wrong:
        more = f", and {len(wrong) - 5} more" if len(wrong) > 5 else ""
        raise CheckpointError(f"{path} is incomplete: {', '.join(wrong[:5])}{more}. Nothing was loaded")


def _sizes(folder: Path) -> dict[str, int]:
    """Return the size of each file in a folder and in those inside it."""
    return {path.relative_to(folder).as_posix(): path.stat().st_size for path in folder.rglob("*") if not path.is_dir()}


def latest(folder: Path) -> Path | None:
    """Return the newest whole checkpoint in a folder."""
    return next(iter(reversed(by_age(folder))), None)


def partials(folder: Path) -> list[Path]:
    """Return what killed saves have left in a folder, and what is being written just now."""
    return sorted(path for path in _folders(folder) if path.name.endswith(PARTIAL))


def is_previous(path: Path) -> bool:
    """Return whether this is a checkpoint that was being replaced when the save was killed."""
    return path.name.endswith(_PREVIOUS)


def find(path: Path) -> Path:
    """Return the checkpoint that a path stands for: itself, or the newest whole one in it.

    Raises:
        UsageError: There is none. The text says what there is instead.
    """
    previous = _sibling(path, _PREVIOUS)
    found = path if read_manifest(path) else latest(path)
    if found is None and read_manifest(previous):
        found = previous  # a save was killed between two renames
    if found is not None:
        return found
    if path.name.endswith(PARTIAL) or (path.is_dir() and (path / _LOCK).exists()):
        raise UsageError(f"{path} is a save that did not finish: load_state({str(path.parent)!r}) finds the newest")
    if partial_folder(path).exists():
        raise UsageError(
            f"{path} was never completed, there is only {partial_folder(path)}: load an earlier checkpoint"
        )
    if not path.exists():
        raise UsageError(
            f"there is no file or folder {path.name!r} in {path.resolve().parent}: give load_state a checkpoint of "
            "save_state, or a folder with checkpoints"
        )
    left = ", ".join(str(partial.name) for partial in partials(path)) if path.is_dir() else ""
    reason = f"it holds only incomplete ones ({left})" if left else f"it has no {MANIFEST}"
    raise UsageError(f"{path} is not a checkpoint of save_state and holds none: {reason}")


def keep_newest(folder: Path, count: int) -> None:
    """Remove all whole checkpoints of a folder but the newest `count`."""
    for path in by_age(folder)[:-count]:
        _retire(path)


def _refuse_name(path: Path) -> None:
    if path.name in ("", "..") or path.name.endswith((PARTIAL, _PREVIOUS)):
        raise UsageError(f"{str(path)!r} is not a name for a checkpoint: give one such as 'checkpoints/step-100'")
    if path.exists() and read_manifest(path) is None:
        raise UsageError(f"{path} exists and is not a checkpoint: give a name inside it, such as '{path}/step-100'")


def _tidy(path: Path) -> None:
    """Remove what killed saves have left in the folder, and bring a checkpoint back whose replacement was killed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    for partial in partials(path.parent):
        if not _is_being_written(partial):
            _remove(partial)
    if partial_folder(path).exists():
        raise UsageError(f"another process is saving {path} just now: wait for it, or give another path")
    for previous in list(_folders(path.parent)):
        name = _replaced_by(previous)
        if not is_previous(previous) or partial_folder(name).exists() or not read_manifest(previous):
            continue
        if name.exists():
            _retire(previous)
        else:
            previous.rename(name)


def _is_being_written(partial: Path) -> bool:
    try:
        with (partial / _LOCK).open() as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except OSError:
        return True
    return False


def by_age(folder: Path) -> list[Path]:
    """Return complete checkpoints, oldest first; one being replaced only while nothing else has its name."""
    found = [(manifest.get("saved_at", 0.0), path) for path in _folders(folder) if (manifest := read_manifest(path))]
    return [path for _, path in sorted(found) if not (is_previous(path) and _replaced_by(path).exists())]


def _folders(folder: Path) -> Iterator[Path]:
    if folder.is_dir():
        yield from (Path(entry.path) for entry in os.scandir(folder) if entry.is_dir())


def _sibling(path: Path, suffix: str) -> Path:
    return path.with_name(path.name + suffix)


def _replaced_by(previous: Path) -> Path:
    return previous.with_name(previous.name.removesuffix(_PREVIOUS))


def _retire(path: Path) -> None:
    """Remove a checkpoint. Renamed first: a removal that is killed leaves nothing that looks like one."""
    doomed = partial_folder(path)
    path.rename(doomed)
    _remove(doomed)


def _remove(path: Path) -> None:
    """Remove a folder; what can't be removed stays, and the next save tries again."""
    shutil.rmtree(path, ignore_errors=True)


def sync(path: Path) -> None:
    """Have what was written to a file or a folder be there after a power failure."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
