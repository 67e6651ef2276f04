"""The meshes of ranks that plans speak of. Each is made once: its groups hold threads, files and memory of the device.

Independent of models.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable
from typing import Any

import torch
import torch.distributed as dist

from nbdist.errors import UsageError
from nbdist.plan import Plan
from nbdist.train import state as training
from nbdist.train.collective.agreement import gather
from nbdist.train.collective.process_group import ensure_group
from nbdist.train.state import State


def mesh() -> Any:
    """Return the `DeviceMesh` of all ranks, as the plan has them. To be called on all ranks.

    >>> nbdist.mesh()["tp"].get_local_rank()

    Its dimensions, from outside in: "pp", "dp_replicate" (ddp, hsdp), "dp_shard" (fsdp, hsdp), "cp" and "tp"; of these
    "pp", "cp" and "tp" only if they are more than 1. With `cp`, parameters are sharded over "dp_shard" and "cp"
    together, which their own meshes have as one dimension, "dp_shard_cp". With `ep`, "dp_shard" is two dimensions:
    "ep", over which experts are divided, and outside of it "efsdp", over which they are sharded.

    Raises:
        UsageError: There is no process group.
    """
    ensure_group()
    if not training.has_group():
        raise UsageError("there is no process group, so there is no mesh: start ranks, or use torchrun")
    state = training.current()
    if state.plan.ep > 1:
        return mesh_of_experts(state)
    return mesh_of(state) if state.plan.cp == 1 else mesh_of_sequences(state)


def mesh_of(state: State) -> Any:
    """Return the mesh of a training, made if it has none yet. To be called on all ranks."""
    plan, device = state.plan, state.device
    if state.mesh is None:
        state.mesh = _kept_mesh(_key(plan, device), lambda: make_mesh(plan, device))
    return state.mesh


def mesh_of_sequences(state: State) -> Any:
    """Return the mesh of a training with the ranks that divide sequences as a dimension. To be called on all ranks.

    It is a mesh of its own: what is sharded has shards and parts of sequences as one dimension, and torch gives no
    public way to make that of two.
    """
    plan, device = state.plan, state.device
    if state.mesh_of_sequences is None:
        key = (*_key(plan, device), "sequences")
        state.mesh_of_sequences = _kept_mesh(key, lambda: make_mesh_of_sequences(plan, device))
    return state.mesh_of_sequences


def mesh_of_experts(state: State) -> Any:
    """Return the mesh of a training with the ranks that divide experts as a dimension. To be called on all ranks.

    It is a mesh of its own, as all but experts is sharded over all ranks that have a shard.
    """
    plan, device = state.plan, state.device
    if state.mesh_of_experts is None:
        key = (*_key(plan, device), "experts", plan.ep)
        state.mesh_of_experts = _kept_mesh(key, lambda: make_mesh_of_experts(plan, device))
    return state.mesh_of_experts


def _key(plan: Plan, device: torch.device) -> tuple[Hashable, ...]:
    return device.type, plan.strategy, plan.replicas, plan.tp, plan.cp, plan.pp


def make_mesh(plan: Plan, device: torch.device) -> Any:
    """Return the ranks by what they share, from outside in: stages, replicas, shards, the parts of layers."""
    made = _mesh(_sizes(plan), device)
    _join(made)
    return made


def make_mesh_of_sequences(plan: Plan, device: torch.device) -> Any:
    """Return the ranks like `make_mesh`, with those that divide sequences as a dimension."""
    return _mesh(_sizes(plan, apart=True), device)


def make_mesh_of_experts(plan: Plan, device: torch.device) -> Any:
    """Return the ranks by the experts that they have: outermost replicas, then shards of the same, innermost others."""
    sizes = _sizes(plan)
    shards = sizes.pop("dp_shard")
    made = _mesh(sizes | {"efsdp": shards // plan.ep, "ep": plan.ep}, device)
    _join(made)
    return made


def shards_of_experts(plan: Plan) -> int:
    """Return how many ranks have the same experts, and shard them.

    Raises:
        UsageError: `ep` does not divide the ranks that have a shard.
    """
    shards = _sizes(plan)["dp_shard"]
    if shards % plan.ep:
        fitting = ", ".join(str(number) for number in range(1, shards + 1) if shards % number == 0)
        raise UsageError(f"ep ({plan.ep}) must divide the {shards} ranks of a replica: set ep to one of {fitting}")
    return shards // plan.ep


def _sizes(plan: Plan, *, apart: bool = False) -> dict[str, int]:
    """Return the dimensions of a mesh, from outside in. `apart`: whether "cp" is one, and not in that of shards."""
    groups = training.world_size() // (plan.tp * plan.cp * plan.pp)
    sizes = {"dp_shard" if plan.strategy == "fsdp" else "dp_replicate": groups}
    if plan.strategy == "hsdp":
        replicas = plan.replicas or _nodes(training.world_size())
        if groups % replicas:  # nodes of different sizes: `Plan.check` knows of replicas that are named only
            raise UsageError(
                f"{groups} ranks can't be divided into {replicas} replicas of the model: set replicas to one of "
                f"{', '.join(str(number) for number in range(1, groups + 1) if groups % number == 0)}"
            )
        sizes = {"dp_replicate": replicas, "dp_shard": groups // replicas}
    if plan.cp > 1:
        shards = sizes.pop("dp_shard")
        sizes |= {"dp_shard": shards, "cp": plan.cp} if apart else {"dp_shard_cp": shards * plan.cp}
    return ({"pp": plan.pp} if plan.pp > 1 else {}) | sizes | ({"tp": plan.tp} if plan.tp > 1 else {})


def _mesh(sizes: dict[str, int], device: torch.device) -> Any:
    return dist.init_device_mesh(device.type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))


def _join(mesh: Any) -> None:
    """Have the norm over shards and parts of layers summed at once: else torch sums twice, and warns of it."""
    names = [name for name in mesh.mesh_dim_names if name in ("dp_shard", "dp_shard_cp", "tp", "efsdp", "ep")]
    flatten = getattr(mesh[tuple(names)], "_flatten", None) if len(names) > 1 else None  # private
    if flatten is not None:
        flatten()


def over_data(mesh: Any) -> Any:
    """Return the ranks as FSDP and HSDP see them."""
    names = [name for name in mesh.mesh_dim_names if name.startswith("dp_") or name == "efsdp"]
    return mesh if len(names) == mesh.ndim else mesh[tuple(names)]


def _nodes(ranks: int) -> int:
    """Return how many nodes the ranks run on, by the launcher's variables."""
    return max(1, ranks // int(os.environ.get("LOCAL_WORLD_SIZE", ranks)))


kept_meshes: dict[Hashable, Any] = {}
_world: Any = None  # the default group that they were made in


def _kept_mesh(key: Hashable, make: Callable[[], Any]) -> Any:
    """Return the mesh of this key, made if not all ranks have it. To be called on all ranks, with the same key.

    Each is made once: its process groups hold threads, files and memory of the device.
    """
    global _world
    if dist.group.WORLD is not _world:
        kept_meshes.clear()
        _world = dist.group.WORLD
    if not all(gather(key in kept_meshes and _is_usable(kept_meshes[key]))):
        kept_meshes[key] = make()
    return kept_meshes[key]


def _is_usable(mesh: Any) -> bool:
    """Return whether its groups are there: one that was interrupted while it was made, or lost a rank, is not."""
    try:
        return all(dist.get_rank(group) >= 0 for group in mesh.get_all_groups())
    except (ValueError, RuntimeError, KeyError):
        return False
