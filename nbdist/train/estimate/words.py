"""What a plan does to save memory, in words. Imports no torch: proposals are shown where there is none."""

from __future__ import annotations

from nbdist.plan import Plan


def savings(plan: Plan) -> list[str]:
    """Return what it keeps elsewhere, or computes again."""
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
