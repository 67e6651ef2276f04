"""A model's weights as safetensors files with an index, as `transformers` reads them: names, shards, one commit.

New files appear beside the old ones, and one rename makes them the model: `model.safetensors` itself where it is one
file, else the index. So a save that is killed leaves the earlier model whole, and other files of the folder alone.
Knows nothing of ranks or modules.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from nbdist.errors import CheckpointError, UsageError

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_SHARD = re.compile(r"model(-\d+)?-\d{5,}-of-\d{5,}\.safetensors")
_PARTIAL = ".partial"
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]i?B|B)?", re.IGNORECASE)
_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30, "TIB": 1 << 40}


def parse_size(size: int | str) -> int:
    """Bytes, from a number or a text such as "5GB" or "512MiB".

    Raises:
        UsageError: It is neither.
    """
    if isinstance(size, int) and not isinstance(size, bool) and size > 0:
        return size
    match = _SIZE.fullmatch(size.strip()) if isinstance(size, str) else None
    found = int(float(match[1]) * _UNITS[(match[2] or "").upper()]) if match else 0
    if not found:
        raise UsageError(f'max_shard_size={size!r}: give bytes, or a text such as "5GB" or "512MiB"')
    return found


def split(sizes: Mapping[str, int], largest: int) -> list[list[str]]:
    """Names in their order, in as many shards as needed; a tensor larger than a shard has one to itself."""
    shards: list[list[str]] = []
    room = 0
    for name, size in sizes.items():
        if not shards or size > room:
            shards.append([])
            room = largest
        shards[-1].append(name)
        room -= size
    return shards


class ModelDraft:
    """A model's files that are being written.

    Args:
        folder: Where; made if it is not there.
        shards: The names of the tensors in each file.
        metadata: Texts that each file and the index carry.
    """

    def __init__(self, folder: Path, shards: Sequence[Sequence[str]], metadata: Mapping[str, str]) -> None:
        self._folder = folder
        self._metadata = {"format": "pt", **metadata}  # `transformers` wants the first
        folder.mkdir(parents=True, exist_ok=True)
        self._earlier = [path for path in folder.iterdir() if path.name in (SINGLE, INDEX) or _is_shard(path.name)]
        self._names = self._file_names(len(shards))
        self._shards = shards
        self._bytes = 0

    def write(self, number: int, tensors: Mapping[str, torch.Tensor]) -> None:
        """Write one shard. The tensors are on the CPU, whole, and share no memory."""
        path = self._partial(self._names[number])
        path.touch()
        mode = path.stat().st_mode
        save_file(dict(tensors), path, metadata=self._metadata)
        path.chmod(mode)  # the library makes files that only their owner can read
        _sync(path)
        self._bytes += sum(tensor.nbytes for tensor in tensors.values())

    def commit(self) -> None:
        """Make what was written the model of the folder."""
        if len(self._names) == 1:
            self._partial(SINGLE).replace(self._folder / SINGLE)
        else:
            for name in self._names:
                self._partial(name).rename(self._folder / name)
            places = {name: file for file, shard in zip(self._names, self._shards, strict=True) for name in shard}
            content = {"metadata": {"total_size": self._bytes, **self._metadata}, "weight_map": places}
            self._partial(INDEX).write_text(json.dumps(content, indent=2) + "\n")
            _sync(self._partial(INDEX))
            self._partial(INDEX).replace(self._folder / INDEX)
        _sync(self._folder)
        kept = {*self._names, INDEX} if len(self._names) > 1 else {SINGLE}
        self._remove(path for path in self._earlier if path.name not in kept)

    def discard(self) -> None:
        """Remove what was written."""
        self._remove(self._partial(name) for name in (*self._names, INDEX))

    def _file_names(self, count: int) -> list[str]:
        """Names that no shard of the present model has, so that it stays whole until the commit."""
        if count == 1:
            return [SINGLE]
        present = {path.name for path in self._earlier}
        series = ("", *(f"-{number}" for number in range(2, len(present) + 3)))
        candidates = ([f"model{s}-{n:05d}-of-{count:05d}.safetensors" for n in range(1, count + 1)] for s in series)
        return next(names for names in candidates if present.isdisjoint(names))

    def _partial(self, name: str) -> Path:
        return self._folder / f"{name}{_PARTIAL}"

    def _remove(self, paths: Iterable[Path]) -> None:
        leftover = [p for p in self._folder.glob(f"model*{_PARTIAL}") if _is_shard(p.name.removesuffix(_PARTIAL))]
        for path in {*paths, *leftover}:
            path.unlink(missing_ok=True)


class ModelFolder:
    """A model's files that are read.

    Args:
        folder: Where they are.

    Raises:
        UsageError: There is no model.
        CheckpointError: Files are missing, or can't be read.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._open: dict[str, Any] = {}
        if (folder / SINGLE).exists():
            files = [SINGLE]
        elif (folder / INDEX).exists():
            files = sorted(set(self._read_index().values()))
        else:
            what = "has neither" if folder.is_dir() else "does not exist, so it has neither"
            raise UsageError(f"{folder} {what} {SINGLE} nor {INDEX}: give the folder that save_model has written")
        missing = [name for name in files if not (folder / name).exists()]
        if missing:
            raise CheckpointError(f"{folder} lacks {', '.join(missing[:5])} ({len(missing)} of {len(files)} files)")
        self._places: dict[str, str] = {name: file for file in files for name in self._file(file).keys()}  # noqa: SIM118

    def shapes(self) -> dict[str, list[int]]:
        """The shape of each tensor."""
        return {name: self._file(file).get_slice(name).get_shape() for name, file in self._places.items()}

    def read(self, name: str) -> torch.Tensor:
        """A tensor on the CPU; its memory is the file's, so only what is used of it is read."""
        tensor: torch.Tensor = self._file(self._places[name]).get_tensor(name)
        return tensor

    def _read_index(self) -> dict[str, str]:
        try:
            places: dict[str, str] = json.loads((self._folder / INDEX).read_bytes())["weight_map"]
        except (ValueError, KeyError, TypeError) as error:
            raise CheckpointError(f"{self._folder / INDEX} can't be read: {error}") from error
        return places

    def _file(self, name: str) -> Any:
        if name not in self._open:
            try:
                self._open[name] = safe_open(self._folder / name, framework="pt")
            except (OSError, SafetensorError) as error:
                raise CheckpointError(f"{self._folder / name} can't be read: {error}") from error
        return self._open[name]


def _is_shard(name: str) -> bool:
    return _SHARD.fullmatch(name) is not None


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
