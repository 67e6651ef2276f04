"""The plan that `prepare` follows in a script: what `%distributed plan` is in a notebook. Independent of notebooks."""

from __future__ import annotations

import torch.distributed as dist

from nbdist.errors import UsageError
from nbdist.plan import PLAN_VARIABLE, Plan
from nbdist.train import active_training
from nbdist.train import state as training
from nbdist.train.collective.process_group import ensure_group


def set_plan(plan: Plan) -> None:
    """Have `prepare` follow a plan from now on, in a script. To be called on all ranks.

    >>> nbdist.set_plan(nbdist.Plan("fsdp", precision="bf16"))

    What is prepared already keeps its own plan. In a notebook, `%distributed plan` and `Session.set_plan` do the same
    on all ranks.

    Args:
        plan: The plan. `Accelerator()` and `TrainingArguments()` follow it, too.

    Raises:
        UsageError: It is not a plan, these ranks can't follow it, or it can't be written as JSON. Nothing has changed.
    """
    if not isinstance(plan, Plan):
        raise UsageError(f"set_plan needs a plan, got {plan!r}: nbdist.set_plan(nbdist.Plan('fsdp'))")
    ensure_group()
    device, count = training.default_device(), training.world_size()
    plan.check(world_size=count, backend=dist.get_backend_config() if training.has_group() else None, device=device)
    active_training.follow({PLAN_VARIABLE: plan.to_json()} | plan.environment(world_size=count, device=device))
