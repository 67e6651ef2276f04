"""Questions by which all ranks of a cell call a function after the same optimizer step, and then go on with the cell.

Each rank is asked to `Gather`, which tells how many steps it has made; then to `Arrive` after a step that none has
passed; and once all have arrived, to `CallNow`.
"""

from __future__ import annotations

from nbdist.wire.base.message import Seconds
from nbdist.wire.questions.question import AnswerBody, Done, Question
from nbdist.wire.questions.stopping import StepsMade


class Gather(Question[StepsMade], frozen=True):
    """Wait at the end of the next step in the cell `serial`, until it is known after which step to call."""

    serial: int


class AtStep(AnswerBody, frozen=True):
    """The rank is there, and waits."""


class Arrive(Question[AtStep], frozen=True):
    """Wait after the step `target`, when the loop's body is finished; answered when that is reached.

    patience: seconds, for the body to finish and then for CallNow, after which the rank goes on with its cell.
    """

    serial: int
    target: int
    patience: Seconds


class Called(AnswerBody, frozen=True):
    """The function has returned. value: what, pickled."""

    value: bytes


class CallNow(Question[Called], frozen=True):
    """Call a function where you wait. call: it and its arguments, a pickled pair. Answered when it has returned."""

    serial: int
    call: bytes


class CallOff(Question[Done], frozen=True):
    """Go on with the cell: there will be no call."""

    serial: int
