"""A model's weights alone, whole, for use elsewhere: `save_model` and `load_model`, on all ranks together.

Rank 0 writes; shards reach it one tensor after the other, so it never holds more than one file and one tensor of a
sharded model. How the files look is in `nbdist.train.safetensors_folder`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor

from nbdist.errors import UsageError
from nbdist.train import meeting
from nbdist.train.safetensors_folder import ModelDraft, ModelFolder, parse_size, split
from nbdist.train.snapshot import listed, plain_name
from nbdist.train.state import default_device, rank


def save_model(
    model: nn.Module,
    folder: str | os.PathLike[str],
    *,
    max_shard_size: int | str = "5GB",
    metadata: Mapping[str, str] | None = None,
    limit: float | None = None,
) -> Path:
    """Save the weights of a model as safetensors, which `transformers` and others read. To be called on all ranks.

    >>> nbdist.save_model(model, "gpt")
    >>> AutoModelForCausalLM.from_pretrained("gpt")

    The names are those of the user's own model, whatever it is wrapped in. Of tied weights one is written. A model with
    a `config` of `transformers` gets that written, too. Other files of the folder are left alone; the weights that it
    holds stay until the new ones are complete.

    Args:
        model: Plain, DDP, FSDP2 or compiled.
        folder: Where to; made if it is not there.
        max_shard_size: Most bytes of a file, as a number or a text such as "5GB".
        metadata: Texts to put into the files.
        limit: Seconds to wait for ranks that have not called it; None: NBDIST_SAVE_LIMIT, else as long as a
            collective may take (`--timeout` of the session). Who is missing is said after 30 s.

    Returns:
        The folder.

    Raises:
        UsageError: Not all ranks have called it, or an argument is wrong. Nothing was written.
        CheckpointError: It could not be written, as when the disk is full. What was there before is whole.
    """
    target = Path(folder)
    meeting.meet("save_model", {"folder": str(target), "max_shard_size": max_shard_size}, limit)
    draft: ModelDraft | None = None
    with meeting.together():
        weights = _Weights.of(model)
        weights.refuse_meta()
        shards = split({name: tensor.nbytes for name, tensor in weights.tensors.items()}, parse_size(max_shard_size))
        if rank() == 0:
            draft = ModelDraft(target, shards, {**weights.tied, **_texts(metadata)})
    try:
        with meeting.together():
            _write(draft, shards, weights.tensors)
        with meeting.together():
            if draft is not None:
                _save_config(model, target)
                draft.commit()
    except BaseException:
        if draft is not None:
            draft.discard()
        raise
    return target


def load_model(model: nn.Module, folder: str | os.PathLike[str], *, limit: float | None = None) -> None:
    """Load weights from safetensors into a model, in place. To be called on all ranks.

    Each rank reads what it needs. A model on the meta device gets its storage here; buffers that no file holds are set
    by their modules' `reset_parameters()`. Values are converted to the model's types.

    Args:
        model: Plain, DDP, FSDP2 or compiled, with the weights that the files hold, no more and no less.
        folder: What `save_model` has written, or `save_pretrained` of `transformers`.
        limit: Seconds to wait for ranks that have not called it; None: NBDIST_SAVE_LIMIT, else as long as a
            collective may take (`--timeout` of the session). Who is missing is said after 30 s.

    Raises:
        UsageError: There is no model in the folder, or another one. Nothing was loaded.
        CheckpointError: Files are missing or can't be read.
    """
    source = Path(folder)
    meeting.meet("load_model", {"folder": str(source)}, limit)
    with meeting.together():
        files = ModelFolder(source)
        weights = _Weights.of(model)
        weights.refuse_other(files.shapes(), source)
        _materialize(model, files.shapes())
    with meeting.together():
        weights = _Weights.of(model)
        found = files.shapes()
        for name, tensor in weights.tensors.items():
            known = next(known for known in (name, *weights.aliases(name)) if known in found)
            _copy(files.read(known), tensor)
        set_model_state_dict(model, get_model_state_dict(model))  # modules that keep more than tensors hear of it


@dataclass(frozen=True)
class _Weights:
    """What of a model goes into files.

    Attributes:
        tensors: Its own tensors by name, each once; shards are DTensors.
        tied: For each name that is another one's, that one.
    """

    tensors: dict[str, torch.Tensor]
    tied: dict[str, str]

    @classmethod
    def of(cls, model: nn.Module) -> _Weights:
        for part in model.modules():
            if isinstance(part, FSDPModule):
                part.reshard()  # after a forward the outermost may still hold whole parameters
        first: dict[int, str] = {}
        tied: dict[str, str] = {}
        for name, tensor in [
            *model.named_parameters(remove_duplicate=False),
            *model.named_buffers(remove_duplicate=False),
        ]:
            own = plain_name(model, name)
            if first.setdefault(id(tensor), own) != own:
                tied[own] = first[id(tensor)]
        state = get_model_state_dict(model)
        tied = {name: target for name, target in tied.items() if name in state and target in state}
        tensors = {n: value for n, value in state.items() if isinstance(value, torch.Tensor) and n not in tied}
        return cls(tensors, tied)

    def aliases(self, name: str) -> list[str]:
        return [other for other, target in self.tied.items() if target == name]

    def refuse_meta(self) -> None:
        if empty := [name for name, tensor in self.tensors.items() if tensor.is_meta]:
            raise UsageError(f"the model has no values yet, it is on the meta device: {listed(empty)}")

    def refuse_other(self, shapes: Mapping[str, list[int]], source: Path) -> None:
        differences = []
        for name, tensor in self.tensors.items():
            known = next((known for known in (name, *self.aliases(name)) if known in shapes), None)
            if known is None:
                differences.append(f"{name} is missing there")
            elif shapes[known] != list(tensor.shape):
                differences.append(f"{name} is {shapes[known]} there and {list(tensor.shape)} here")
        differences += [f"{n} is only there" for n in shapes if n not in self.tensors and n not in self.tied]
        if differences:
            raise UsageError(f"{source} holds another model: {listed(differences)}. Nothing was loaded")


def _write(draft: ModelDraft | None, shards: list[list[str]], tensors: Mapping[str, torch.Tensor]) -> None:
    """Bring the tensors to rank 0 one after the other. All ranks stay until the last, as each needs them all."""
    failure: Exception | None = None
    for number, shard in enumerate(shards):
        whole: dict[str, torch.Tensor] = {}
        for name in shard:
            tensor = _whole(tensors[name])
            if draft is not None and failure is None:
                whole[name] = _alone(tensor)
            del tensor
        try:
            if draft is not None and failure is None:
                draft.write(number, whole)
        except Exception as error:
            failure = error
    if failure is not None:
        raise failure


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    if not isinstance(tensor, DTensor):
        return tensor.detach()
    # Offloaded shards are on the CPU, where the group of the mesh can't gather them.
    shard: Any = tensor.detach().to(tensor.device_mesh.device_type)
    full: torch.Tensor = shard.full_tensor()
    return full


def _alone(tensor: torch.Tensor) -> torch.Tensor:
    """On the CPU, in memory of its own: the format knows no views."""
    tensor = tensor.cpu().contiguous()
    return tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()


@torch.no_grad()
def _copy(value: torch.Tensor, target: torch.Tensor) -> None:
    if isinstance(target, DTensor):
        value = value.to(target.device_mesh.device_type)
        shard = distribute_tensor(value, target.device_mesh, target.placements, src_data_rank=None)
        target.to_local().copy_(shard.to_local())
    else:
        target.copy_(value)


def _materialize(model: nn.Module, shapes: Mapping[str, list[int]]) -> None:
    """Give storage to what is on the meta device. What is tied stays tied."""
    empty = [tensor for tensor in (*model.parameters(), *model.buffers()) if tensor.is_meta]
    if not empty:
        return
    unset = [
        module
        for prefix, module in model.named_modules()
        for name, buffer in module.named_buffers(recurse=False)
        if buffer.is_meta and plain_name(model, f"{prefix}.{name}" if prefix else name) not in shapes
    ]
    for module in unset:
        if not callable(getattr(module, "reset_parameters", None)):
            raise UsageError(
                f"{type(module).__name__} has buffers on the meta device that no file holds, and no reset_parameters() "
                "to set them: build the model on the CPU. Nothing was loaded"
            )
    if any(isinstance(parameter, DTensor) for parameter in model.parameters()):
        if any(not parameter.is_meta for parameter in model.parameters()):
            raise UsageError("a part of the sharded model is on the meta device: build all of it there, or nothing")
        model.to_empty(device=default_device())
    else:
        _give_storage(model)
    for module in dict.fromkeys(unset):
        module.reset_parameters()


def _give_storage(model: nn.Module) -> None:
    made: dict[int, torch.Tensor] = {}
    parameters = list(model.named_parameters(remove_duplicate=False))
    for name, tensor in [*parameters, *model.named_buffers(remove_duplicate=False)]:
        if not tensor.is_meta:
            continue
        if id(tensor) not in made:
            fresh = torch.empty_like(tensor, device=default_device())
            is_parameter = isinstance(tensor, nn.Parameter)
            made[id(tensor)] = nn.Parameter(fresh, tensor.requires_grad) if is_parameter else fresh
        owner, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(owner), attribute, made[id(tensor)])


def _save_config(model: Any, folder: Path) -> None:
    """What `transformers` needs to build the model again."""
    for part in model.modules():
        for name in ("config", "generation_config"):
            save = getattr(getattr(part, name, None), "save_pretrained", None)
            if callable(save):
                save(folder)
        if hasattr(part, "config"):
            return


def _texts(metadata: Mapping[str, str] | None) -> dict[str, str]:
    for key, value in (metadata or {}).items():
        if not isinstance(key, str) or not isinstance(value, str):
            raise UsageError(f"metadata[{key!r}] is {type(value).__name__}: the files hold texts only")
    return dict(metadata or {})
