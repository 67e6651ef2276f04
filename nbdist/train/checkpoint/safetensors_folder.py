"""A model's weights as safetensors files with an index, as `transformers` reads them: names, shards, one commit.

New files appear beside the old ones, and one rename makes them the model: `model.safetensors` itself where it is one
file, else the index. So a save that is killed leaves the earlier model whole, and other files of the folder alone.
Independent of ranks or modules.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from nbdist.base.checks import is_whole
from nbdist.errors import CheckpointError, UsageError
from nbdist.train.checkpoint.checkpoint_folder import sync

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_SHARD = re.compile(r"model(-\d+)?-\d{5,}-of-\d{5,}\.safetensors")
_PARTIAL = ".partial"
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]i?B|B)?", re.IGNORECASE)
_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30, "TIB": 1 << 40}


def parse_size(size: int | str) -> int:
    """Return a size in bytes, from a number or a str such as "5GB" or "512MiB".

    Raises:
        UsageError: It is neither.
    """
    if is_whole(size, 1):
        return size
    match = _SIZE.fullmatch(size.strip()) if isinstance(size, str) else None
    found = int(float(match[1]) * _UNITS[(match[2] or "").upper()]) if match else 0
    if not found:
        raise UsageError(f'max_shard_size={size!r}: give bytes, or a text such as "5GB" or "512MiB"')
    return found


def split(sizes: Mapping[str, int], largest: int) -> list[list[str]]:
    """Return the names in their order, in as many shards as needed; a tensor larger than a shard has one to itself."""
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
        sync(path)
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
            sync(self._partial(INDEX))
            self._partial(INDEX).replace(self._folder / INDEX)
        sync(self._folder)
        kept = {*self._names, INDEX} if len(self._names) > 1 else {SINGLE}
        self._remove(path for path in self._earlier if path.name not in kept)

    def discard(self) -> None:
        """Remove what was written."""
        self._remove(self._partial(name) for name in (*self._names, INDEX))

    def _file_names(self, count: int) -> list[str]:
        """Return the names that no shard of the present model has, so that it stays whole until the commit."""
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
        single: Name of the only file; by default found.

    Raises:
        UsageError: There is no model.
        CheckpointError: Files are missing, or can't be read.
    """

    def __init__(self, folder: Path, single: str = SINGLE) -> None:
        self._folder = folder
        self._open: dict[str, Any] = {}
        self._offsets: dict[str, dict[str, int]] = {}
        if (folder / single).exists():
            files = [single]
        elif (folder / INDEX).exists():
            files = sorted(set(read_index(folder / INDEX).values()))
        else:
            what = "has neither" if folder.is_dir() else "does not exist, so it has neither"
            raise UsageError(f"{folder} {what} {SINGLE} nor {INDEX}: give the folder that save_model has written")
        missing = [name for name in files if not (folder / name).exists()]
        if missing:
            raise CheckpointError(f"{folder} lacks {', '.join(missing[:5])} ({len(missing)} of {len(files)} files)")
        self._places: dict[str, str] = {name: file for file in files for name in self._file(file).keys()}  # noqa: SIM118

    def shapes(self) -> dict[str, list[int]]:
        """Return the shape of each tensor."""
        return {name: self._file(file).get_slice(name).get_shape() for name, file in self._places.items()}

    def read(self, name: str) -> torch.Tensor:
        """Return a tensor on the CPU; its memory is the file's, so only what is used of it is read."""
        tensor: torch.Tensor = self._file(self._places[name]).get_tensor(name)
        return tensor

    def read_rows(self, name: str, start: int, target: torch.Tensor) -> None:
        """Read as many rows of a tensor as the target has, from `start` on, straight into its memory.

        By system calls: mapped pages would count as this process's memory, and are slow to come over a network.

        Args:
            name: Of the tensor.
            start: The first row.
            target: On the CPU, contiguous, of the type in the file.

        Raises:
            CheckpointError: The file has changed meanwhile, or can't be read.
        """
        path = self._folder / self._places[name]
        row = math.prod(target.shape[1:]) * target.element_size()
        offset = self._offset(self._places[name], name) + start * row
        buffer: Any = target.detach().reshape(-1).view(torch.uint8).numpy()
        memory = memoryview(buffer)
        with path.open("rb", buffering=0) as file:
            file.seek(offset)
            while memory:
                count = file.readinto(memory)
                if not count:
                    raise CheckpointError(f"{path} ends too early: it has changed while it was read")
                memory = memory[count:]

    def _offset(self, file: str, name: str) -> int:
        """Return where a tensor begins in its file, as the header says: its length in 8 bytes, then JSON."""
        if file not in self._offsets:
            with (self._folder / file).open("rb") as opened:
                length = int.from_bytes(opened.read(8), "little")
                header = json.loads(opened.read(length))
            self._offsets[file] = {
                key: 8 + length + entry["data_offsets"][0] for key, entry in header.items() if key != "__metadata__"
            }
        return self._offsets[file][name]

    def in_order(self, names: Iterable[str]) -> list[str]:
        """Return the names in the order of the files."""
        wanted = set(names)
        return [name for name in self._places if name in wanted]

    def _file(self, name: str) -> Any:
        if name not in self._open:
            try:
                self._open[name] = safe_open(self._folder / name, framework="pt")
            except (OSError, SafetensorError) as error:
                raise CheckpointError(f"{self._folder / name} can't be read: {error}") from error
        return self._open[name]


def read_index(index: Path) -> dict[str, str]:
    """Return the file of each tensor, as an index says.

    Raises:
        CheckpointError: It can't be read.
    """
    try:
        places: dict[str, str] = json.loads(index.read_bytes())["weight_map"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{index} can't be read: {error}") from error
    return places


def _is_shard(name: str) -> bool:
    return _SHARD.fullmatch(name) is not None
