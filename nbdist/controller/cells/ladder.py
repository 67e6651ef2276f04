"""How a cell is stopped, step by step: each rung only if the one before was not enough. One object per stopping cell.

Rungs: all ranks stop after the same optimizer step; KeyboardInterrupt, but ranks first finish a step that others have
made; ranks stuck in a collective are freed by force. Decides which rank is asked what, and when. Has no access to
sockets, and knows ranks only by their answers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from nbdist.base import limits
from nbdist.base.limits import NO_SLACK, Slack
from nbdist.controller.base.inquiries import AskRanks
from nbdist.wire.questions.question import NoAnswer
from nbdist.wire.questions.stopping import Aim, Arm, Cut, Disarm, Meet, StepsMade

ARM, AIM, MEET, RAISE, CUT = "arm", "aim", "meet", "raise", "cut"

_STEPS = 3  # ... and how many median steps
_SLOWER = 1.5  # times the median that the steps of a rank may take that is behind
_SPARE_STEPS = 2  # extra steps allowed to it
_LONG = 1.0  # seconds: a wait this long is worth a line
_CUT_EVERY = 0.5


class Ladder:
    """A cell that is being stopped.

    Args:
        serial: The cell's serial number.
        ranks: The ranks to stop.
        ask: Asks control threads.
        raise_on: Sends KeyboardInterrupt to ranks.
        say: Shows a line below the cell.
        now: The time in seconds, like all times here.
        together: Whether these are all ranks that run the cell, so that they can stop at the same step.
        grace: Seconds until a rank counts as stuck.
        slack: What waits for the ranks are longer by.

    Attributes:
        due: Time of the next `tick`; None if there is nothing to wait for.
        rung: The current rung.
        forced: Whether the user does not want to wait.
    """

    def __init__(
        self,
        serial: int,
        ranks: Sequence[int],
        ask: AskRanks,
        raise_on: Callable[[Sequence[int]], None],
        say: Callable[[str], None],
        now: float,
        *,
        together: bool = True,
        grace: float = limits.STUCK,
        slack: Slack = NO_SLACK,
    ) -> None:
        self.serial = serial
        self.left = set(ranks)
        self.due: float | None = None
        self.rung = ARM
        self._ask = ask
        self._raise_on = raise_on
        self._say = say
        self._began = now
        self._grace = grace + slack.travel
        self._slack = slack
        self.forced = False
        self._together = together
        self._behind: set[int] = set()
        self._steps: dict[int, StepsMade | NoAnswer] = {}
        self._in_the_end = ""  # replaces the line in the end
        if together:
            self._arm()
            self.due = now + limits.ARM + slack.answers
        else:
            self._raise(now)

    def force(self, now: float) -> None:
        """Free stuck ranks at once: the user does not want to wait."""
        self.forced = True
        if self.rung in (ARM, AIM):
            self._interrupt(now)
        else:
            self._raise(now)

    def ended(self, rank: int) -> None:
        """Note that a rank has left the cell."""
        self.left.discard(rank)
        if self.rung == MEET and rank in self._behind:
            self._behind.discard(rank)
            if not self._behind:
                self.due = self._began  # no other rank is waited for
        if not self.left:
            self.due = None
        if not self.left and self._in_the_end:
            self._say(self._in_the_end)

    def armed(self, rank: int, steps: StepsMade | NoAnswer, now: float) -> None:
        """Handle a rank's report of the steps it has made."""
        if self.rung not in (ARM, MEET) or not self.left:
            return
        self._steps[rank] = steps
        if self.left <= self._steps.keys():
            self._aim(now) if self.rung == ARM else self._meet(now)

    def tick(self, now: float) -> None:
        """Do what is due at this time."""
        if self.due is None or now < self.due:
            return
        if self.rung == ARM:
            self._aim(now)
        elif self.rung == AIM:
            self._interrupt(now)
        elif self.rung == MEET:
            self._raise(now)
        else:
            self._cut(now)

    def _aim(self, now: float) -> None:
        """Have all ranks stop after the step that none has passed yet; go to the next rung if they are not stepping."""
        steps = self._known()
        if len(steps) < len(self.left) or not _stepping(list(steps.values())):
            self._interrupt(now)
            return
        target = max(answer.count for answer in steps.values()) + 1
        left = {rank: target - answer.count for rank, answer in steps.items()}
        needed = {rank: left[rank] * (answer.median or 0.0) for rank, answer in steps.items()}
        limit = max(_limit(answer, left[rank]) for rank, answer in steps.items())
        last = max(needed, key=needed.__getitem__)
        if needed[last] > limit:  # it won't get there in time
            self._interrupt(now)
            return
        self.rung = AIM
        self.due = now + limit + self._slack.answers
        self._ask(sorted(self.left), Aim(self.serial, target))
        if left[last] > 1 and needed[last] > _LONG:
            self._say(
                f"all ranks will stop after step {target:,}: rank {last} has {left[last]:,} steps to go, about "
                f"{needed[last]:.0f} s. Interrupt again to stop now."
            )
            self._in_the_end = f"rank {last} had {left[last]:,} steps to go before all could stop"

    def _interrupt(self, now: float) -> None:
        """Interrupt all ranks, but first ask where they are, so that none is left a step behind."""
        if not self._together:
            self._raise(now)
            return
        self.rung = MEET
        self._steps = {}
        self.due = now + (limits.HURRIED_ARM if self.forced else limits.ARM) + self._slack.answers
        self._arm()

    def _meet(self, now: float) -> None:
        """Interrupt ranks that are in or past the latest step any has begun; let the others finish it."""
        steps = self._known()
        target = max((answer.count + answer.stepping for answer in steps.values()), default=0)
        self._behind = {rank for rank, answer in steps.items() if answer.count < target}  # in that step, or before it
        self._ask(sorted(self.left), Meet(self.serial, target))
        if self._behind:
            self.due = now + limits.FINISH_STEP + self._slack.answers
        elif self.forced:
            self.due = now + limits.FORCED + self._slack.travel
        else:
            self._wait(now)

    def _raise(self, now: float) -> None:
        if self._together:
            self._ask(sorted(self.left), Disarm(self.serial))
        self._raise_on(sorted(self.left))
        if self.forced:
            self._cut(now)
        else:
            self._wait(now)

    def _wait(self, now: float) -> None:
        """Wait for interrupted ranks; those that do not end are stuck."""
        self.rung = RAISE
        self.due = max(self._began + self._grace, now + min(limits.RAISE, self._grace) + self._slack.travel)

    def _cut(self, now: float) -> None:
        soon = self.rung != CUT and self._grace < _CUT_EVERY
        self.rung = CUT
        self.due = now + (limits.CUT_AGAIN if soon else _CUT_EVERY) + self._slack.travel
        self._ask(sorted(self.left), Cut(self.serial, self.forced))

    def _arm(self) -> None:
        self._ask(sorted(self.left), Arm(self.serial), self.armed)

    def _known(self) -> dict[int, StepsMade]:
        """Return the steps of ranks that still run the cell, as far as they have reported."""
        known = {rank: steps for rank, steps in self._steps.items() if isinstance(steps, StepsMade)}
        return {rank: steps for rank, steps in known.items() if rank in self.left and steps.running}


def _stepping(steps: Sequence[StepsMade]) -> bool:
    """Return whether every rank has recently made a step in this cell."""
    recent = max(limits.REACH_STEP, _STEPS * _median(steps))
    return all(answer.count > 0 and (answer.age or 0.0) < recent for answer in steps)


def _limit(answer: StepsMade, left: int) -> float:
    """Return the seconds a rank gets to make `left` steps: the slowest rank decides, up to a limit."""
    median = answer.median or 0.0
    behind = min(limits.CATCH_UP, (_SLOWER * left + _SPARE_STEPS) * median)
    return max(limits.REACH_STEP, _STEPS * median, behind)


def _median(steps: Sequence[StepsMade]) -> float:
    return max((answer.median or 0.0 for answer in steps), default=0.0)
