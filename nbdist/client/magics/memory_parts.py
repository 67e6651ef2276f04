"""`%distributed memory --parts`: what memory is held as, now on each rank, and at the peak of a training step."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from nbdist import shells
from nbdist.base.text import percent, size, table
from nbdist.client.costs.memory_report import HERE
from nbdist.client.magic_lines.plan_line import flags
from nbdist.client.session.session import Session, rank_set_of
from nbdist.client.start import session_plan
from nbdist.metrics.allocation.held_parts import KINDS, HeldParts, held_parts

if TYPE_CHECKING:
    from nbdist.train.estimate.estimate import Estimate

_MODULES = 10  # lines
_WORTH = 0.01  # of all


def held_by_user() -> list[HeldParts]:
    """Return what this process holds, with the names of its user's variables."""
    shell = shells.current()
    return held_parts(shell.user_ns if shell is not None else {})


def held_table(session: Session | None, ranks: str | None) -> str:
    """Return what is held now, a row for each rank and device.

    Args:
        session: Whose ranks; None for this process.
        ranks: Which, in the format of `-r`; None for all.
    """
    if session is None:
        found = {HERE: held_by_user()}
    else:
        rank_set = rank_set_of(session)
        chosen = rank_set.among(ranks) or rank_set.living()
        found = dict(zip(chosen, rank_set.set_up(held_by_user, ranks=chosen), strict=True))  # no cell of the user's
    rows = [(rank, part) for rank, parts in found.items() for part in parts]
    if not rows:
        return "no tensors are held"
    header = ("rank", "device", *KINDS, "unknown", "peak", "largest other")
    return table([_row(rank, part) for rank, part in rows], header)


def _row(rank: int | str, part: HeldParts) -> list[str]:
    name = "notebook" if rank == HERE else str(rank)
    amounts = [size(getattr(part, kind)) for kind in KINDS]
    other = part.largest[0].describe() if part.largest else ""
    return [name, part.device, *amounts, size(part.unknown), size(part.peak), other]


def peak_in_words(session: Session | None, model: str, batch: str) -> str:
    """Return what a step holds at its peak, by part and by module, and what checkpointing gives back.

    Args:
        session: On whose rank 0 the variables are; None: in this notebook.
        model: Expression of the model, or of a function that makes it.
        batch: Expression of a micro-batch.
    """
    from nbdist.train.estimate.propose import estimate_with_and_without_checkpoints

    plan = session.plan if session is not None else session_plan.kept()
    if session is None:
        kept, recomputed = estimate_with_and_without_checkpoints(model, batch, plan.to_json(), 1)
    else:
        arguments = (model, batch, plan.to_json(), len(session.ranks))
        ((kept, recomputed),) = session.call(estimate_with_and_without_checkpoints, *arguments, ranks=[0])
    how = f"`%distributed plan {flags(plan, plan.replace(activation_checkpointing='full'))}`"
    parts = [f"at the peak of a step, estimated: {kept}", *_by_module(kept), _given_back(kept, recomputed)]
    is_done = plan.activation_checkpointing == "full"
    return "\n".join([*parts, "the plan does that already" if is_done else f"{how} does that"])


def _by_module(found: Estimate) -> Iterator[str]:
    whole = sum(found.modules.values())
    if not whole:
        return
    shown = [(name, amount) for name, amount in found.modules.items() if amount >= _WORTH * whole][:_MODULES]
    rows = [(name, size(amount), percent(amount / whole)) for name, amount in shown]
    if rest := whole - sum(amount for _, amount in shown):
        rows.append(("others", size(rest), percent(rest / whole)))
    yield table(rows, ("activations saved by", "of a micro-batch", "share"))


def _given_back(kept: Estimate, recomputed: Estimate) -> str:
    saved = kept.total - recomputed.total
    if saved <= 0:
        return "checkpointing each block would save nothing"
    price = "n/a" if not kept.flops or not recomputed.flops else percent(recomputed.flops / kept.flops - 1)
    return (
        f"checkpointing each block would save {size(saved)} (estimated) for {price} more FLOPs, and about as much "
        "more time"
    )
