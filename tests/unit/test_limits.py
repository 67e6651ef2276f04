"""What must hold between limits that race each other."""

from __future__ import annotations

import pytest

from nbdist.base import limits
from nbdist.client.costs.monitor import SLOWEST
from nbdist.controller.cells.watch import Pauses
from tests.stand_ins.nccl import LOOK


@pytest.mark.parametrize(
    ("less", "more"),
    [
        pytest.param(limits.ARM, limits.AIM, id="ranks wait until it is known where to stop"),
        pytest.param(limits.BODY, limits.REACH_STEP, id="a loop's body ends before its rank is interrupted"),
        pytest.param(limits.HURRIED_BODY, limits.FINISH_STEP, id="so it does when a rank is behind"),
        pytest.param(limits.REACH_STEP, limits.CATCH_UP, id="a rank that is behind has longer than the others"),
        pytest.param(limits.HURRIED_ARM, limits.ARM, id="a second interrupt waits for less than the first"),
        pytest.param(limits.FORCED, limits.FINISH_STEP, id="force comes sooner where no rank is behind"),
        pytest.param(limits.RESEND, limits.STUCK, id="KeyboardInterrupt comes again before a rank counts as stuck"),
        pytest.param(limits.RESEND + limits.PROOF, limits.STUCK, id="what torch notes late does not count by then"),
        pytest.param(LOOK, limits.PROOF, id="torch notes within a proof what has ended"),
        pytest.param(limits.PROCESSOR_LATE, limits.IDLE_PROOF, id="the kernel what a thread has used"),
        pytest.param(limits.IDLE_PROOF, limits.SURVIVORS, id="survivors that rest are freed at the first look"),
        pytest.param(limits.PROOF, limits.CUT_AGAIN, id="the second look at survivors can prove that they are stuck"),
        pytest.param(limits.SURVIVORS + limits.CUT_AGAIN, limits.DEATH_GRACE, id="before a cell gives them up"),
        pytest.param(
            limits.HURRIED_ARM + limits.FINISH_STEP,
            limits.FORCE_GRACE,
            id="ranks are freed by force before the notebook goes on without them",
        ),
        pytest.param(
            limits.ARM + limits.REACH_STEP + limits.ARM + limits.FINISH_STEP,
            limits.TIMEOUT_GRACE,
            id="all rungs before KeyboardInterrupt fit into a timeout's grace",
        ),
        pytest.param(limits.SURVIVORS, limits.DEATH_IN_LAUNCH, id="survivors are freed before a launch gives them up"),
        pytest.param(limits.SURVIVORS, limits.DEATH_GRACE, id="survivors are freed before a cell gives them up"),
        pytest.param(limits.DEATH_GRACE + limits.DEATH_ANSWER, 0.5, id="a death is shown within half a second"),
        pytest.param(limits.LAUNCH_PATIENCE + limits.FAILED_GRACE, 1.0, id="Ctrl-C ends a launch within a second"),
        pytest.param(limits.COLLECTIVE_GRACE, limits.LAUNCH_GRACE, id="stuck ranks are freed before a launch ends"),
        pytest.param(limits.RENEWAL, limits.RENEW, id="a rank reports a group that can't be renewed in time"),
        pytest.param(
            limits.MAIN_THREAD + limits.DRIVER_ANSWER,
            limits.STATUS_ANSWER,
            id="a rank whose torch can't be asked reports what the driver knows in time",
        ),
        pytest.param(limits.MAIN_THREAD, limits.METRICS_ANSWER, id="and the panel what it knows without"),
        pytest.param(limits.COMPARE, limits.RENEW, id="looking takes less than repairing"),
    ],
)
def test_one_limit_is_over_before_the_other(less: float, more: float) -> None:
    assert less < more


@pytest.mark.parametrize("limit", ["COMPLETION_ANSWER", "METRICS_ANSWER", "STATUS_ANSWER"])
def test_no_question_is_dropped_that_is_still_waited_for(limit: str) -> None:
    assert getattr(limits, limit) <= limits.STALE


def test_the_panel_shows_what_its_last_look_has_seen_however_rarely_it_looks() -> None:
    assert limits.PANEL_LOOK >= SLOWEST


def test_a_rank_that_a_look_waits_for_has_been_looked_at_before_the_next_one() -> None:
    assert Pauses().answer <= min(Pauses().confirm, Pauses().repeat)
