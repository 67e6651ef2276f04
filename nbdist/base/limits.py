"""Limits that depend on one another, in seconds: of waits that race each other, mostly in different processes.

`tests/unit/test_limits.py` has what must hold between them. What nothing else depends on is where it is used. They
are meant for one machine: who waits for an answer from other nodes adds the round trips there.
"""

from __future__ import annotations

from dataclasses import dataclass

# --- how late what others write down may be: a decision by two looks at it needs them further apart than that.
# The list of all such decisions: docs/decisions/late_records.md.

COLLECTIVE_LATE = 0.1  # that a collective has ended: NCCL's watchdog looks every 100 ms (kWatchdogThreadSleepMillis)
MACHINE_LATE = 10.0  # a look at a machine: as long as the sampler waits for a driver that takes its time
ENERGY_LATE = 0.1  # what a GPU has used, by its driver: it is measured every 20 to 100 ms (arXiv 2312.02741)
PROCESSOR_LATE = 0.02  # processor time of a thread that runs: two ticks of a kernel with 100 of them a second

# --- stopping a cell at a step: the rank's side, then the controller's ladder

AIM = 10.0  # that a rank waits in its step to be told where to stop
BODY = 1.0  # until the end of the loop's body is no longer waited for
HURRIED_BODY = 0.1  # ... when the rank is to be interrupted anyway
ARM = 0.5  # for ranks to report how many steps they have made
HURRIED_ARM = 0.2  # ... when the user does not want to wait
REACH_STEP = 2.0  # at least, for ranks to reach the step at which all stop
CATCH_UP = 10.0  # at most, for a rank that is behind
FINISH_STEP = 0.2  # for ranks to finish a step that others have made, and the loop's body
FORCED = 0.05  # from a forced interrupt to force, if no rank is behind

# --- KeyboardInterrupt

RESEND = 1.0  # until one that did not end the cell is sent again
RAISE = 1.0  # at least, for a rank to stop after it
STUCK = 2.0  # from the request until a rank that still runs counts as stuck
PROOF = COLLECTIVE_LATE + 0.02  # that a rank is seen in one place before it counts as stuck
IDLE_PROOF = PROCESSOR_LATE + 0.005  # ... if it uses no processor
CUT_AGAIN = 0.15  # until the second look whether a rank is stuck, where the first comes early
FORCE_GRACE = 2.0  # for ranks to stop after the second Ctrl-C, before the notebook is given back without them
TIMEOUT_GRACE = 4.0  # for ranks to stop after --timeout

# --- a death, which is shown within half a second

SURVIVORS = 0.03  # until the survivors count as stuck
DEATH_IN_LAUNCH = 0.1  # for the other ranks of a launch to end
DEATH_GRACE = 0.3  # for survivors to stop
DEATH_ANSWER = 0.1  # for them to report where they are

# --- a launch: a rank that fails ends the others, as with torchrun, and Ctrl-C leaves nothing after a second

LAUNCH_PATIENCE = 0.4  # from an interrupt until a rank that still runs counts as stuck
LAUNCH_GRACE = 1.0  # for ranks to stop when another one has failed
FAILED_GRACE = 0.5  # for them to end then
COLLECTIVE_GRACE = 0.5  # that ranks may wait in a collective for one that raised

# --- repairs after a cell that has failed

COMPARE = 1.0  # for idle ranks to report where they are
RENEWAL = 10.0  # that a rank waits for the others to renew a group: all are idle, so more means that one has gone
RENEW = 15.0  # for ranks to carry out their repairs

# --- signs of life between nodes, which all follow from `--node-timeout`

NODE_TIMEOUT = 60.0  # without one until the other side is given up
SHORTEST_NODE_TIMEOUT = 3.0


def silence(node_timeout: float) -> float:
    """Return the seconds without a sign of life after which that is reported."""
    return min(10.0, node_timeout / 3)


def ping_period(node_timeout: float) -> float:
    """Return the seconds between two questions for one."""
    return min(2.0, silence(node_timeout) / 4)


# --- what waits are longer by


@dataclass(frozen=True)
class Slack:
    """What is added to waits for ranks, in seconds.

    Attributes:
        travel: What their answers take longer than on one machine.
        answers: What the answers may take longer, because machines are far away or loaded. It costs no time where all
            answer, as the last answer ends the wait.
    """

    travel: float = 0.0
    answers: float = 0.0


NO_SLACK = Slack()  # on one machine
MOST_SLACK = 5.0  # that users can ask for


# --- questions to ranks

COMPLETION_ANSWER = 0.15  # for a rank to complete or inspect a name
METRICS_ANSWER = 0.5  # ... to report what the panel shows
STATUS_ANSWER = 1.0  # ... to report its memory
MAIN_THREAD = 0.1  # of it: for the rank's main thread to come back from C and ask torch
DRIVER_ANSWER = 0.5  # of it: for the driver to report the memory that torch could not
STATUS_LOOK = 2.0  # that its last look at torch's allocator may have been old then, else the driver's figure is true
PANEL_LOOK = 60.0  # ... for the panel, which may look that rarely
STACK_ANSWER = 0.3  # ... to report the line that it is at
STALE = 1.0  # after which nobody waits for an answer any more, so that it is not worked out
