"""This rank becomes one of more or fewer: its number, its environment, its groups, and the models that are in them.

What connects the new default group, and makes models ready for their next step, is the Recover that follows.
"""

from __future__ import annotations

import os
from collections.abc import MutableMapping
from typing import Any

from nbdist.train import active_training
from nbdist.wire.messages.healing import Resize
from nbdist.wire.messages.rank_processes import RankSetup, renumbered
from nbdist.worker.groups import accelerate_state, deepspeed_state, join
from nbdist.worker.groups.process_groups import Collectives
from nbdist.worker.groups.resized_groups import ResizedGroups, resize_groups
from nbdist.worker.recovery import reset_models

_SHARDED = (
    "sharded models (FSDP2, tensor parallel) were created before this change: build and prepare them again, then call "
    "`nbdist.load_state(path)`"
)
_ENGINES = (
    "DeepSpeed engines were created before this change: build their models again, make or prepare them, and load "
    "weights that were saved whole, such as those of `nbdist.save_model`"
)
_MESHES = "device meshes were created before this change: create them again"


def take_post(setup: RankSetup, order: Resize, names: MutableMapping[str, Any]) -> RankSetup:
    """Take a new number among another number of ranks.

    Args:
        setup: What this rank was.
        order: What it is to be.
        names: The variables of cells; those that nbdist has set and nobody has changed get their new values.

    Returns:
        What it is now.
    """
    now = renumbered(setup, order.post)
    os.environ.update(join.numbers(now))
    for name in ("rank", "local_rank", "world_size"):
        if names.get(name) == getattr(setup, name):
            names[name] = getattr(now, name)
    accelerate_state.renumber(now.rank, now.local_rank, now.world_size)
    deepspeed_state.forget_ranks()
    return now


def take_groups(collectives: Collectives, setup: RankSetup, order: Resize) -> tuple[ResizedGroups, list[str]]:
    """Have the default group of the new size, and everything that is prepared in it.

    Args:
        collectives: The groups of this rank.
        setup: What it is now.
        order: What was ordered.

    Returns:
        What became of the groups, and what else there is to know.

    Raises:
        RuntimeError: torch lacks what this takes.
    """
    ddp = [model for model in _living("torch.nn.parallel", "DistributedDataParallel")]
    groups = resize_groups(collectives, order.group, order.numbers, setup.rank, setup.world_size)
    for model in ddp:
        if groups.before is not None and getattr(model, "process_group", None) is groups.before:
            model.process_group = groups.now
    notes = []
    if groups.dropped:
        verb = "has" if len(groups.dropped) == 1 else "have"
        notes.append(f"{', '.join(groups.dropped)} {verb} lost ranks and can't be used any more")
    if _living("deepspeed.runtime.engine", "DeepSpeedEngine"):
        notes.append(_ENGINES)
    if _living("torch.distributed.fsdp", "FSDPModule"):
        notes.append(_SHARDED)
    elif _living("torch.distributed.device_mesh", "DeviceMesh"):
        notes.append(_MESHES)
    if active_training.training is not None:
        notes += active_training.training.resized()
    return groups, notes


def _living(module: str, name: str) -> list[Any]:
    return reset_models.living(reset_models.loaded(module, name))
