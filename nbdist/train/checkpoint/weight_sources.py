"""Where the weights of a model come from: safetensors, the hub, pickled files, DCP folders, a state dict on rank 0.

Each knows the shapes of its tensors, and fills others with them so that a rank never holds more than its own part and
one tensor. Independent of modules or plans.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import re
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader, TensorStorageMetadata
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from nbdist.errors import CheckpointError, UsageError
from nbdist.train import state as training
from nbdist.train.checkpoint.packed_parts import in_pieces
from nbdist.train.checkpoint.safetensors_folder import INDEX, SINGLE, ModelFolder, read_index
from nbdist.train.checkpoint.saving import without_group_warning

Shapes = Mapping[str, Sequence[int]]
Targets = Sequence[tuple[str, torch.Tensor]]

PICKLED = "pytorch_model.bin"
PICKLED_INDEX = "pytorch_model.bin.index.json"
_PICKLED_SUFFIXES = (".bin", ".pt", ".pth")
_DCP = ".metadata"
_HUB_NAME = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")
_FROM_HUB = (SINGLE, INDEX, "model-*.safetensors")
_PICKLED_FROM_HUB = (PICKLED, PICKLED_INDEX, "pytorch_model-*.bin")


class Source(Protocol):
    """Weights that a model can be filled with.

    Attributes:
        exclusive: Whether there is nothing else beside a model's tensors.
    """

    exclusive: bool

    def shapes(self) -> Shapes | None:
        """Return the shape of each tensor by its name here; None if only rank 0 knows."""

    def fill(self, targets: Targets) -> None:
        """Give tensors the values of those with these names. To be called on all ranks, with targets in one order."""


def open_source(given: Any) -> Source:
    """Return what a user gives as `weights`.

    Raises:
        UsageError: There are no weights, or not of a kind that is known.
        CheckpointError: Files are missing, or can't be read.
    """
    if isinstance(given, Mapping):
        return StateOfRank0(given)
    if not isinstance(given, str | os.PathLike):
        raise UsageError(
            f"invalid weights of type {type(given).__name__}: give a folder, the name of a model on the Hugging Face "
            "hub, or a state dict on rank 0 and {} on the others"
        )
    path = Path(given).expanduser()
    if path.exists() or not isinstance(given, str) or not _HUB_NAME.fullmatch(given):
        return _open_path(path)
    return _open_from_hub(given)


def described(given: Any) -> str:
    """Return what ranks must agree on of what they are given."""
    return "a state dict" if isinstance(given, Mapping) else f"weights={os.fspath(given)!r}"


def _open_path(path: Path) -> Source:
    if path.is_file() and path.suffix == ".safetensors":
        return SafetensorsFiles(ModelFolder(path.parent, single=path.name))
    if path.is_file() and path.suffix in _PICKLED_SUFFIXES:
        return PickledFiles([path])
    if (path / SINGLE).exists() or (path / INDEX).exists():
        return SafetensorsFiles(ModelFolder(path))
    if (path / _DCP).exists():
        return DcpFolder(path)
    if (path / PICKLED).exists() or (path / PICKLED_INDEX).exists():
        return PickledFiles(_pickled_files(path))
    if not path.exists():
        raise UsageError(f"{path} does not exist: give a folder with weights, or the name of a model on the hub")
    raise UsageError(
        f"{path} holds no weights: it has neither {SINGLE} nor {INDEX}, no {_DCP} of torch.distributed.checkpoint, and "
        f"no {PICKLED}. Give the folder that save_model, save_pretrained or save_state has written"
    )


# --- files


class SafetensorsFiles:
    """Files of which each rank reads its own rows, straight to where they belong."""

    exclusive = True

    def __init__(self, files: ModelFolder) -> None:
        self._files = files

    def shapes(self) -> Shapes:
        """Return the shapes in the files."""
        return self._files.shapes()

    def fill(self, targets: Targets) -> None:
        """Read file by file."""
        by_name = dict(targets)
        for name in self._files.in_order(by_name):
            self._fill(name, by_name[name])

    @torch.no_grad()
    def _fill(self, name: str, target: torch.Tensor) -> None:
        whole = self._files.read(name)  # nothing of it is read before it is used
        first = _first_row(target) if target.dim() else None
        if first is None:
            copy_part(whole, target)
            return
        local = target.to_local() if isinstance(target, DTensor) else target.detach()
        is_plain = type(local) is torch.Tensor and local.device.type == "cpu"  # fp8 weights are of a class of their own
        fits = is_plain and local.dtype == whole.dtype and local.is_contiguous()
        rows = local if fits else torch.empty(local.shape, dtype=whole.dtype)
        self._files.read_rows(name, first, rows)
        if not fits:
            local.copy_(rows)


class PickledFiles:
    """Tensors in files of `torch.save`, read with `weights_only`, so that nothing in them is run.

    Raises:
        UsageError: They hold more than tensors, or are too old to be read in parts.
        CheckpointError: They can't be read.
    """

    exclusive = True

    def __init__(self, paths: Sequence[Path]) -> None:
        self._tensors: dict[str, torch.Tensor] = {}
        for path in paths:
            self._tensors |= _unpickled(path)
        if training.rank() == 0:
            warnings.warn(
                f"{paths[0]} holds pickled weights: they are read with weights_only=True, so no code in them is run. "
                "nbdist.save_model writes safetensors",
                stacklevel=2,
            )

    def shapes(self) -> Shapes:
        """Return the shape of each tensor."""
        return {name: list(tensor.shape) for name, tensor in self._tensors.items()}

    def fill(self, targets: Targets) -> None:
        """Copy from the memory of the files, of which only what is used is read."""
        for name, target in targets:
            copy_part(self._tensors[name], target)


def _pickled_files(folder: Path) -> list[Path]:
    if (folder / PICKLED).exists():
        return [folder / PICKLED]
    paths = [folder / name for name in sorted(set(read_index(folder / PICKLED_INDEX).values()))]
    missing = [path.name for path in paths if not path.exists()]
    if missing:
        raise CheckpointError(f"{folder} lacks {', '.join(missing[:5])} ({len(missing)} of {len(paths)} files)")
    return paths


def _unpickled(path: Path) -> dict[str, torch.Tensor]:
    try:
        found = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except pickle.UnpicklingError:
        raise UsageError(
            f"{path} holds more than tensors, and loading it would run code: if you trust it, load it on rank 0 with "
            "torch.load(path, weights_only=False) and give prepare the state dict"
        ) from None
    except (OSError, RuntimeError, EOFError) as error:
        raise CheckpointError(f"{path} can't be read: {str(error).splitlines()[0]}") from error
    for key in ("state_dict", "model"):
        if isinstance(found, dict) and isinstance(found.get(key), Mapping):
            found = found[key]
    if not isinstance(found, Mapping) or not all(isinstance(value, torch.Tensor) for value in found.values()):
        raise UsageError(f"{path} is not a state dict of a model: give a file that maps names to tensors")
    return dict(found)


@torch.no_grad()
def copy_part(whole: torch.Tensor, target: torch.Tensor) -> None:
    """Copy into a tensor what of a whole one belongs there: all, or this rank's shard."""
    if not isinstance(target, DTensor):
        target.copy_(whole)
        return
    first = _first_row(target)
    local = target.to_local()
    if first is not None:
        local.copy_(whole.narrow(0, first, len(local)))
        return
    on_mesh = whole.to(target.device_mesh.device_type)
    local.copy_(distribute_tensor(on_mesh, target.device_mesh, target.placements, src_data_rank=None).to_local())


def _first_row(target: torch.Tensor) -> int | None:
    """Return the first row of a whole tensor that belongs to this rank; None if not whole rows do."""
    if not isinstance(target, DTensor):
        return 0
    first, rows = 0, target.size(0)
    for dimension, placement in enumerate(target.placements):
        if placement.is_replicate():
            continue
        if type(placement) is not Shard or placement.dim != 0:
            return None
        length = -(-rows // target.device_mesh.size(dimension))  # as torch.chunk cuts; the last may have less, or none
        skipped = min(rows, length * target.device_mesh.get_local_rank(dimension))
        first, rows = first + skipped, min(length, rows - skipped)
    return first


# --- the hub


def _open_from_hub(name: str) -> Source:
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise UsageError(
            f"{name!r} is not a folder here, and names on the hub need huggingface_hub: type "
            "`pip install huggingface_hub`, or give a folder"
        ) from None
    with contextlib.suppress(Exception):  # not in the cache, or not all of it
        return _open_path(Path(snapshot_download(name, local_files_only=True)))
    try:
        folder = Path(snapshot_download(name, allow_patterns=list(_FROM_HUB)))
        if not any((folder / file).exists() for file in (SINGLE, INDEX)):
            snapshot_download(name, allow_patterns=list(_PICKLED_FROM_HUB))
        return _open_path(folder)
    except Exception as error:  # of the network, the name or the right to read it: the library has many
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise UsageError(
            f"{name!r} is neither a folder here nor a complete model in the hub's cache, and downloading it did not "
            f"help: {first}. Check the name, or type `hf download {name}` where there is a network"
        ) from error


# --- others


class DcpFolder:
    """A checkpoint of `torch.distributed.checkpoint`, such as `save_state` writes; ranks read it together."""

    exclusive = False

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        try:
            kept = FileSystemReader(folder).read_metadata().state_dict_metadata
        except Exception as error:  # it is a pickle
            raise CheckpointError(f"{folder / _DCP} can't be read: {error}") from error
        self._shapes = {
            name: list(entry.size) for name, entry in kept.items() if isinstance(entry, TensorStorageMetadata)
        }

    def shapes(self) -> Shapes:
        """Return those of an optimizer's state, too."""
        return self._shapes

    def fill(self, targets: Targets) -> None:
        """Read the stored pieces that this rank's shards need."""
        alone = training.world_size() == 1
        with without_group_warning():
            dcp.load(in_pieces(dict(targets)), storage_reader=FileSystemReader(self._folder), no_dist=alone)


class StateOfRank0:
    """A state dict on rank 0, of which all ranks get one tensor after the other."""

    exclusive = True

    def __init__(self, tensors: Mapping[str, Any]) -> None:
        self._tensors = tensors
        if training.rank() != 0:
            return
        strange = [name for name, value in tensors.items() if not isinstance(value, torch.Tensor)]
        if strange or not tensors:
            what = f"{strange[0]!r} is {type(tensors[strange[0]]).__name__}" if strange else "it is empty"
            raise UsageError(f"weights on rank 0 are not a state dict of a model (names to tensors): {what}")

    def shapes(self) -> Shapes | None:
        """Return the shapes on rank 0; None on other ranks."""
        if training.rank() != 0:
            return None
        return {name: list(tensor.shape) for name, tensor in self._tensors.items()}

    @torch.no_grad()
    def fill(self, targets: Targets) -> None:
        """Rank 0 sends whole tensors, in the types that they get: all of them even if it fails, as others wait."""
        failure: Exception | None = None
        for name, target in targets:
            whole = torch.empty(target.shape, dtype=target.dtype, device=training.default_device())
            try:
                if training.rank() == 0 and failure is None:
                    whole.copy_(self._tensors[name])
            except Exception as error:  # raised below, when the others have got all they wait for
                failure = error
            if training.world_size() > 1:
                dist.broadcast(whole.reshape(-1).view(torch.uint8), src=0)  # every backend can send bytes
            copy_part(whole, target)
        if failure is not None:
            raise failure
