"""A plan in words: for each setting what will be done and why."""

from __future__ import annotations

from collections.abc import Iterator

from nbdist.base.ranks import format_ranks
from nbdist.planning.settings import SETTINGS, SHARDED, TYPES, Settings, default_of, show
from nbdist.planning.sharing import batch_ranks

Row = tuple[str, str, str]

_SHOWN = 8  # groups of ranks


def table(plan: Settings, world_size: int | None, device: object) -> str:
    """See `Plan.table`."""
    kind = str(device).split(":")[0] if device is not None else ""
    rows = list(_rows(plan, world_size, kind))
    first, second = (max(len(row[column]) for row in rows) for column in (0, 1))
    lines = [f"{name:<{first}}  {value:<{second}}  {text}" for name, value, text in rows]
    return "\n".join([*lines, "Everything else is PyTorch's default."])


def _rows(plan: Settings, world_size: int | None, kind: str) -> Iterator[Row]:
    yield "strategy", plan.strategy, _strategy(plan, world_size)
    dividing = plan.tp * plan.cp * plan.pp
    if max(dividing, plan.ep) > 1 and world_size is not None and world_size % dividing == 0:
        yield "mesh", _mesh(plan, world_size), _sharers(plan, world_size)
    yield "precision", plan.precision, _precision(plan)
    for name, setting in SETTINGS.items():
        value = getattr(plan, name)
        if setting.tell is not None and value != default_of(name):
            yield name, show(value), setting.tell if isinstance(setting.tell, str) else setting.tell(plan, kind)


def _strategy(plan: Settings, world_size: int | None) -> str:
    ranks = "all ranks" if world_size is None else f"{world_size} ranks"
    if plan.strategy == "none":
        return (
            "one process: nothing to exchange"
            if world_size == 1
            else "each rank trains on its own: nothing is exchanged"
        )
    if world_size == 1:
        return "one rank only: nothing to exchange"
    if plan.strategy == "ddp" and plan.local_sgd_steps:
        return "each rank holds the whole model and makes its own steps"
    if plan.strategy == "ddp":
        return (
            f"each rank holds the whole model; gradients are averaged over {ranks} during backward, "
            f"in buckets of {plan.bucket_mb:g} MiB"
        )
    if plan.strategy == "deepspeed":
        return f"DeepSpeed's ZeRO stage {plan.stage}: {_STAGES[plan.stage]} split over {ranks}"
    state = "parameters, gradients and optimizer state are split"
    if plan.pp > 1:
        return f"{state} over the ranks of each stage; blocks, embedding and head are gathered when needed"
    if plan.strategy == "fsdp":
        return f"{state} over {ranks}; blocks, embedding and head are gathered when needed"
    if plan.replicas is None:
        return f"{state} over the ranks of each node; gradients are averaged between nodes"
    groups = f"{plan.replicas} group{'s' if plan.replicas > 1 else ''} of ranks"
    return f"{state} inside each of {groups}; gradients are averaged between groups"


_STAGES = {
    1: "each rank holds the whole model; optimizer state is",
    2: "each rank holds the whole model; gradients and optimizer state are",
    3: "parameters, gradients and optimizer state are",
}


def _mesh(plan: Settings, world_size: int) -> str:
    """Return the dimensions of the mesh of ranks, from outside in."""
    groups = world_size // (plan.tp * plan.cp * plan.pp)
    sizes = {"dp_shard": groups}
    if plan.strategy == "hsdp":
        sizes = {"dp": groups} if plan.replicas is None else {"dp_replicate": plan.replicas}
        sizes |= {} if plan.replicas is None else {"dp_shard": groups // plan.replicas}
    if plan.ep > 1 and "dp_shard" in sizes:
        sizes |= {"efsdp": sizes.pop("dp_shard") // plan.ep, "ep": plan.ep}
    sizes |= {name: size for name, size in (("cp", plan.cp), ("tp", plan.tp)) if size > 1}
    sizes = ({"pp": plan.pp} if plan.pp > 1 else {}) | sizes
    return " x ".join(f"{name} {size}" for name, size in sizes.items())


def _sharers(plan: Settings, world_size: int) -> str:
    """Return which ranks share a batch."""
    batches = batch_ranks(plan, world_size)
    if len(batches) == world_size:
        return "each rank has a batch of its own"
    shown = " | ".join(map(format_ranks, batches[:_SHOWN]))
    return f"ranks that share a batch: {shown}{' | ...' if len(batches) > _SHOWN else ''}"


def _precision(plan: Settings) -> str:
    if plan.precision == "fp32":
        return "nothing is cast: computed as the model's parameters are, float32 in general"
    if plan.precision == "fp8":
        slow = "" if plan.compile else "; without compile that is slower than bf16"
        return (
            f"the products of large linear layers are computed in float8 (torchao, {plan.fp8_recipe}), the output "
            f"layer and everything else in bfloat16{slow}"
        )
    kind = TYPES[plan.precision]
    scaled = "; the loss is scaled, and a step with an overflow is skipped" if plan.precision == "fp16" else ""
    if plan.strategy == "deepspeed":
        return f"parameters, activations and gradients are {kind}; the optimizer steps in float32{scaled}"
    if plan.strategy in SHARDED:
        return f"blocks are gathered and computed in {kind}; the optimizer steps in the parameters' own type{scaled}"
    return f"autocast: matrix products in {kind}; parameters keep their own type{scaled}"


def savings(plan: Settings) -> list[str]:
    """Return in words what a plan does to save memory: what it keeps elsewhere, or computes again."""
    words = []
    if plan.activation_budget is not None:
        words.append(f"activation budget {plan.activation_budget:g}")
    if plan.activation_checkpointing != "none":
        words.append(f"activation checkpointing {plan.activation_checkpointing}")
    if plan.activation_offload:
        words.append("activation offload")
    if plan.offload:
        words.append("offload")
    return words
