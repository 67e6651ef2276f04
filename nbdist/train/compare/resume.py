"""How a training goes on after a dead rank was replaced: everything prepared gets the state of its last whole step.

Called on all ranks, by the session after a heal or by a user; torch is loaded there already.
"""

from __future__ import annotations

from dataclasses import dataclass

from nbdist.base.ranks import describe_ranks
from nbdist.errors import UsageError
from nbdist.train import active_training


@dataclass(frozen=True)
class ResumeReport:
    """Where a training goes on, the same on all ranks. It prints as one line.

    Attributes:
        steps: Optimizer steps that had been made.
        source: What its state was taken from.
    """

    steps: int
    source: str

    def __repr__(self) -> str:
        return f"training continues from step {self.steps:,}{self.source}"


def resume() -> ResumeReport | None:
    """Go on after a heal: with the state of the ranks that have made the most steps, if they hold all of it; else with
    the last copies of `replicate`, else with the newest checkpoint that this run has saved. To be called on all ranks.

    Returns:
        Where the training goes on; None if no rank has prepared anything.

    Raises:
        UsageError: Some ranks have prepared nothing; or they lack a state, and nothing has been kept or saved.
    """
    from nbdist.train import state as training
    from nbdist.train.checkpoint.checkpoint import load_state
    from nbdist.train.checkpoint.neighbor_copies import restore_copies
    from nbdist.train.collective.agreement import gather
    from nbdist.train.compare.replicas import TornShards, take_state

    mine = training.current() if training.is_begun() else None
    told = gather((mine is not None, mine.saved_in if mine is not None else "", active_training.newcomer))
    if not any(begun for begun, _, _ in told):
        return None
    if bare := [rank for rank, (begun, _, _) in enumerate(told) if not begun]:
        verb = "has" if len(bare) == 1 else "have"
        raise UsageError(
            f"{describe_ranks(bare)} {verb} prepared nothing, so the training can't continue there: mark the cell that "
            "makes and prepares the model with `%%distributed --setup`"
        )
    report = take_state(src=None, group=None)
    if isinstance(report, TornShards):
        steps = restore_copies(training.current(), newcomer=active_training.newcomer)
        if steps is not None:
            active_training.newcomer = False
            return ResumeReport(steps, ": the last copies of `nbdist.replicate`")
        folder = next((saved for _, saved, _ in told if saved), "")
        if not folder:
            raise UsageError(
                f"{report.text}, and neither `nbdist.replicate` nor `nbdist.save_state` has kept them: {report.advice}"
            )
        loaded = load_state(folder)
        return ResumeReport(loaded.steps, f": loaded {loaded.path}")
    return ResumeReport(training.current().steps, f", with the state of rank {report.src}")
