"""Which strategy fits the memory: tries the estimate of one after the other. Independent of who asks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from typing import TYPE_CHECKING, Any

from nbdist import shells
from nbdist.errors import UsageError
from nbdist.metrics.node import host
from nbdist.plan import Plan
from nbdist.planning.describe import savings
from nbdist.planning.rules import own_settings

if TYPE_CHECKING:
    from nbdist.train.estimate.estimate import Estimate

_SPARE = 0.1  # of the memory: the estimate is within 10 %


def propose(
    model: Any, batch: Any, plan: Plan | str, *, world_size: int, sharing: int = 1, memory: int | None = None
) -> dict[str, Any]:
    """Estimate strategies in the order of what they cost in speed, until one fits the memory with a tenth to spare.

    Args:
        model: What is to be trained, or a function that makes it; it is not changed.
        batch: What one micro-batch of one rank holds.
        plan: All other settings; JSON will do.
        world_size: Number of ranks.
        sharing: How many of them share this rank's memory.
        memory: Bytes that each rank has; None: those of its GPU that others leave, else those that are free here.

    Returns:
        "plan": the first that fits, as JSON, or None; "memory": bytes for each rank; "taken": bytes of its GPU that
        others hold; "tried": for each strategy its name and its bytes per rank.

    Raises:
        UsageError: Such ranks can't follow one of them, or the estimate can't be made; the text says why.
    """
    from nbdist.train.estimate.estimate import estimate_each

    if isinstance(plan, str):
        plan = Plan.from_json(plan)
    limit, taken = (memory, 0) if memory is not None else memory_of_device(world_size, sharing)
    tried = []
    candidates = list(_candidates(plan, world_size, has_gpu()))
    with closing(estimate_each(model, batch, candidates, world_size=world_size)) as estimates:
        for candidate in candidates:
            candidate.check(world_size=world_size, device="cuda" if has_gpu() else "cpu")
            total = next(estimates).total
            tried.append((_name(candidate), total))
            if total <= limit * (1 - _SPARE):
                return {"plan": candidate.to_json(), "memory": limit, "taken": taken, "tried": tried}
    return {"plan": None, "memory": limit, "taken": taken, "tried": tried}


def propose_variables(model: str, batch: str, plan: str, world_size: int, sharing: int) -> dict[str, Any]:
    """Propose a plan like `propose`, for expressions of this process's shell and a plan in JSON.

    Raises:
        UsageError: They name a variable that is not there; or as `propose`.
    """
    model, batch = _variables(model, batch)
    return propose(model, batch, plan, world_size=world_size, sharing=sharing)


def estimate_in_words(model: str, batch: str, plan: str, world_size: int) -> str:
    """Estimate a step of this plan, for expressions of this process's shell, and return it as text.

    Raises:
        UsageError: They name a variable that is not there, or the estimate can't be made; the text says why.
    """
    from nbdist.train.estimate.estimate import estimate

    return str(estimate(*_variables(model, batch), Plan.from_json(plan), world_size=world_size))


def estimate_with_and_without_checkpoints(
    model: str, batch: str, plan: str, world_size: int
) -> tuple[Estimate, Estimate]:
    """Estimate a step that keeps all activations, and one that computes each block again, with details.

    Args:
        model: An expression of this process's shell.
        batch: Likewise.
        plan: All other settings, as JSON.
        world_size: Number of ranks.

    Raises:
        UsageError: They name a variable that is not there, or the estimate can't be made; the text says why.
    """
    from nbdist.train.estimate.estimate import estimate_each

    settings = Plan.from_json(plan).replace(activation_budget=None, activation_offload=False)
    plans = [settings.replace(activation_checkpointing=kind) for kind in ("none", "full")]
    with closing(estimate_each(*_variables(model, batch), plans, world_size=world_size, details=True)) as found:
        return next(found), next(found)


def _variables(model: str, batch: str) -> tuple[Any, Any]:
    """Return what two expressions mean in this process's shell."""
    shell = shells.current()
    names = shell.user_ns if shell is not None else {}
    try:
        return eval(model, names), eval(batch, names)
    except NameError as error:
        raise UsageError(f"--model and --batch are variables of rank 0, or of the notebook: {error}") from None


def memory_of_device(world_size: int, sharing: int) -> tuple[int, int]:
    """Return what a rank may use: of its GPU, else of what is free on this machine or in its container.

    Args:
        world_size: Number of ranks.
        sharing: How many of them share it. Each is taken to hold as much as this one.

    Returns:
        Bytes for each rank, and bytes of its GPU that are not theirs.
    """
    if not has_gpu():
        whole, used = host.memory()
        return (whole - used) // sharing, 0
    import torch

    from nbdist.train.estimate.estimate import outside_torch

    free, whole = torch.cuda.mem_get_info()
    own = torch.cuda.memory_reserved() + outside_torch(world_size)
    taken = max(0, whole - free - sharing * own)
    return (whole - taken) // sharing, taken


def has_gpu() -> bool:
    """Return whether this rank computes on a GPU."""
    import torch

    return torch.cuda.is_available()


def _candidates(plan: Plan, world_size: int, offloads: bool) -> Iterator[Plan]:
    """Yield the plans to try. Without a GPU nothing can be moved to the CPU's memory: it is there."""
    checkpointing = {"activation_checkpointing": "full", "activation_budget": None}
    if world_size == 1:
        whole = plan.replace(**own_settings(plan, "none"))
        yield from (whole, whole.replace(**checkpointing))
    else:
        yield plan.replace(**own_settings(plan, "ddp"))
    sharded = plan.replace(**own_settings(plan, "fsdp") | {"offload": False})
    lean = sharded.replace(exchange="each") if plan.accumulate > 1 else sharded
    if world_size > 1:
        yield from dict.fromkeys((sharded, lean))
        yield lean.replace(**checkpointing)
    if offloads:
        yield lean.replace(offload=True)
        yield lean.replace(offload=True, **checkpointing)


def _name(plan: Plan) -> str:
    extras = []
    if plan.exchange == "each":
        extras.append("gradients exchanged in each micro-batch")
    return " + ".join([plan.strategy, *extras, *savings(plan)])
