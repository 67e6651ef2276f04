"""A model's weights alone, whole, for use elsewhere: `save_model` and `load_model`, on all ranks together.

Rank 0 writes; shards reach it one tensor after the other, so it never holds more than one file and one tensor of a
sharded model. How the files look is in `nbdist.train.checkpoint.safetensors_folder`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from nbdist.errors import UsageError
from nbdist.train.checkpoint.safetensors_folder import ModelDraft, ModelFolder, parse_size, split
from nbdist.train.checkpoint.state_snapshot import listed
from nbdist.train.checkpoint.weight_sources import SafetensorsFiles
from nbdist.train.checkpoint.weights import ModelTensors, fit, give_storage, set_buffers
from nbdist.train.collective import agreement, meeting
from nbdist.train.loop import averages
from nbdist.train.pipeline.stages import Stages, stages_of
from nbdist.train.sharding.zero import refuse_overruled, refuse_partitioned
from nbdist.train.sharding.zero_engine import whole
from nbdist.train.state import current, default_device, rank


def save_model(
    model: nn.Module,
    folder: str | os.PathLike[str],
    *,
    max_shard_size: int | str = "5GB",
    metadata: Mapping[str, str] | None = None,
    averaged: bool = False,
    limit: float | None = None,
) -> Path:
    """Save the weights of a model as safetensors, which `transformers` and others read. To be called on all ranks.

    >>> nbdist.save_model(model, "gpt")
    >>> AutoModelForCausalLM.from_pretrained("gpt")

    The names are those of the user's own model, whatever it is wrapped in. Of tied weights one is written. A model with
    a `config` of `transformers` gets that written, too. Other files of the folder are left alone; the weights that it
    holds stay until the new ones are complete.

    Args:
        model: Plain, DDP, FSDP2, compiled, or DeepSpeed's engine, whose parameters all ranks then gather.
        folder: Where to; made if it is not there.
        max_shard_size: Most bytes of a file, as a number or a text such as "5GB".
        metadata: Texts to put into the files.
        averaged: Save the averaged weights (`ema` in the plan) of a prepared model instead of the last ones.
        limit: Seconds to wait for ranks that have not called it; None: NBDIST_SAVE_LIMIT, else as long as a
            collective may take (`--timeout` of the session). Who is missing is said after 30 s.

    Returns:
        The folder.

    Raises:
        UsageError: Not all ranks have called it, or an argument is wrong. Nothing was written.
        CheckpointError: It could not be written, as when the disk is full. What was there before is whole.
    """
    target = Path(folder)
    arguments = {"folder": str(target), "max_shard_size": max_shard_size, "averaged": averaged}
    meeting.meet("save_model", arguments, limit)
    if not averaged:
        with whole(model) as inner:
            return _save(inner, target, max_shard_size, metadata)
    with agreement.together():
        averages.refuse_without_average(model, current())
    with averages.averaged(model):
        return _save(model, target, max_shard_size, metadata)


def _save(model: nn.Module, target: Path, max_shard_size: int | str, metadata: Mapping[str, str] | None) -> Path:
    draft: ModelDraft | None = None
    with agreement.together():
        refuse_partitioned("save_model", model.parameters())
        weights = ModelTensors.of(model)
        _refuse_meta(weights)
        tensors = _of_all_stages(model, weights.tensors)
        shards = split({name: tensor.nbytes for name, tensor in tensors.items()}, parse_size(max_shard_size))
        if rank() == 0:
            draft = ModelDraft(target, shards, {**weights.tied, **_texts(metadata)})
    try:
        with agreement.together():
            _write(draft, shards, tensors, stages_of(model))
        with agreement.together():
            if draft is not None:
                _save_config(model, target)
                draft.commit()
    except BaseException:  # Ctrl-C included: a draft is no model
        if draft is not None:
            draft.discard()
        raise
    return target


def load_model(model: nn.Module, folder: str | os.PathLike[str], *, limit: float | None = None) -> None:
    """Load weights from safetensors into a model, in place. To be called on all ranks.

    Each rank reads what it needs. A model on the meta device gets its storage here; buffers that no file holds are set
    by their modules' `reset_parameters()`, or by the model of `transformers` that they are in. Values are converted to
    the model's types.

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
    with agreement.together():
        refuse_overruled("load_model", model.parameters())
        fitting = fit(model, SafetensorsFiles(ModelFolder(source)), str(source))
        set_buffers(model, default_device())
        give_storage(model, default_device())
    fitting.fill(model)


def _refuse_meta(weights: ModelTensors) -> None:
    if empty := [name for name, tensor in weights.tensors.items() if tensor.is_meta]:
        raise UsageError(f"the model has no values yet, it is on the meta device: {listed(empty)}")


def _of_all_stages(model: nn.Module, own: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
    """Return the tensors of a model, in the same order on all ranks; those of other stages without values."""
    stages = stages_of(model)
    if stages is None:
        return own
    found = {**stages.elsewhere(own.keys()), **own}
    return {name: found[name] for name in stages.forms}


def _write(
    draft: ModelDraft | None, shards: list[list[str]], tensors: Mapping[str, torch.Tensor], stages: Stages | None
) -> None:
    """Bring the tensors to rank 0 one after the other. All ranks stay until the last, as each needs them all."""
    failure: Exception | None = None
    for number, shard in enumerate(shards):
        whole: dict[str, torch.Tensor] = {}
        for name in shard:
            tensor = _whole(tensors[name]) if stages is None else _from_stage(tensors[name], name, stages)
            if draft is not None and failure is None:
                whole[name] = _alone(tensor)
            del tensor
        try:
            if draft is not None and failure is None:
                draft.write(number, whole)
        except Exception as error:  # raised below, when the others need this rank no more
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


def _from_stage(tensor: torch.Tensor, name: str, stages: Stages) -> torch.Tensor:
    """Return a whole tensor on rank 0, wherever its stage is."""
    stage = stages.forms[name].stage
    if stages.number == stage:
        tensor = _whole(tensor)
    if stage == 0 or stages.rank_of(0) != 0:  # ranks of other pipelines have the same
        return tensor
    if stages.number == stage:
        dist.send(tensor.contiguous(), 0, group=stages.group)
    elif rank() == 0:
        tensor = torch.empty(tensor.shape, dtype=tensor.dtype, device=default_device())
        dist.recv(tensor, stages.rank_of(stage), group=stages.group)
    return tensor


def _alone(tensor: torch.Tensor) -> torch.Tensor:
    """Copy a tensor to the CPU, in its own memory: the format has no views."""
    tensor = tensor.cpu().contiguous()
    return tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()


def _save_config(model: Any, folder: Path) -> None:
    """Save what `transformers` needs to build the model again."""
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
            raise UsageError(f"metadata[{key!r}] is {type(value).__name__}: these files can hold only strings")
    return dict(metadata or {})
