"""What a session does when ranks die under a cell (`%distributed start --on-death`): nothing, heal them, or end."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import TypeVar

from nbdist.base.ranks import describe_ranks
from nbdist.client.base import interruption
from nbdist.client.healing.heal import HealReport
from nbdist.client.ranks.rank_set import RankSet
from nbdist.client.reports import death_report
from nbdist.client.start.start_settings import OnDeath
from nbdist.errors import NbdistError, RankDied
from nbdist.train.compare.resume import ResumeReport, resume

T = TypeVar("T")
_TRIES = 3  # that a cell has from one step on
_LEAVE_LIMIT = 5.0  # seconds for ranks to leave a cell in which others have died


def outlive(
    attempt: Callable[[], T],
    policy: OnDeath,
    heal: Callable[[], HealReport],
    close: Callable[[], None],
    set_up: Callable[[Callable[[], ResumeReport | None]], list[ResumeReport | None]],
    report: Callable[[str], object],
) -> T:
    """Run a cell, and act as the policy says when ranks die under it.

    With "heal" they are replaced, all ranks take the state of the last step, and the cell runs again, unless it has
    died three times from the same step on, or the user had asked it to stop.

    Args:
        attempt: Runs the cell once.
        policy: What to do.
        heal: Replaces the dead ranks.
        close: Ends all of them.
        set_up: Calls a function on all ranks.
        report: Called with what was done, a few lines each time.

    Raises:
        RankDied: With "ask" and "stop"; with "heal" if nothing is being trained, or ranks die again at once.
        KeyboardInterrupt: With "heal" if the user had interrupted the cell.
        SessionBroken: With "heal": they could not be replaced.
    """
    tried: Counter[int] = Counter()  # by the step from which the training went on
    while True:
        try:
            return attempt()
        except RankDied as error:
            if policy == "stop":
                death_report.finish()  # while there are ranks to ask
                close()
                report("the session was stopped because of `--on-death stop`")
            if policy != "heal":
                raise
            report(_first_line(error))
            now = _go_on(error, heal, set_up, report)
            if now is None:
                raise
            if error.interrupted:
                at = f"all ranks are at step {now.steps:,}{now.source}"
                raise interruption.interruption(f"{at}; run the cell again to continue") from error
            report(str(now))
            tried[now.steps] += 1
            if tried[now.steps] == _TRIES:
                raise


def heal_all(rank_set: RankSet, heal: Callable[..., HealReport], report: Callable[[str], object]) -> HealReport:
    """Replace the ranks that have died, and those that never leave the cell in which they did.

    Args:
        rank_set: The ranks.
        heal: Replaces some of them, like `Session.heal`.
        report: Called with a line about ranks that are stuck.
    """
    traffic, living = rank_set.traffic, rank_set.living()
    traffic.wait_free(living, _LEAVE_LIMIT)
    stuck = sorted(rank for rank, task in traffic.running(living).items() if task.bereaved)
    if not stuck:
        return heal()
    verb, them = ("does", "is") if len(stuck) == 1 else ("do", "are")
    report(f"{describe_ranks(stuck)} {verb} not leave the cell, so {them} replaced, too")
    return heal(sorted({*traffic.dead, *stuck}), kill=True)


def _go_on(
    death: RankDied,
    heal: Callable[[], HealReport],
    set_up: Callable[[Callable[[], ResumeReport | None]], list[ResumeReport | None]],
    report: Callable[[str], object],
) -> ResumeReport | None:
    """Replace dead ranks, and return where the training goes on; None if none is under way."""
    try:
        report(str(heal()))
        return set_up(resume)[0]
    except NbdistError as error:
        raise error from death


def _first_line(error: RankDied) -> str:
    return str(error).splitlines()[0]
