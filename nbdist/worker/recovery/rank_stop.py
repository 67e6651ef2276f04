"""How what this rank runs is ended before its end, rung by rung; the controller's `ladder` decides which rung is next.

1. `Arm`, `Aim`: the rank waits at the end of its next optimizer step, until it is known after which step all ranks can
   stop, and stops there, between two steps (`step_stop`).
2. `Interrupt`: KeyboardInterrupt on the main thread. It is held back while a step is applied, and sent again if code
   has swallowed it (`worker.cell.interrupts`). `Meet` does the same on ranks that others are one step ahead of, once
   they have made that step.
3. `Cut`: the connections of the process groups are cut, if the main thread stands still (`position`). `Strand` does the
   same at once, and tells the error why: another rank has failed.

`Gather`, `Arrive` and `CallNow` bring ranks together like 1., to call something, after which the cell goes on.

`rank_recovery` puts in order what this leaves behind.
"""

from __future__ import annotations

import contextlib
import pickle
from typing import Any

from nbdist.metrics.events import step_events
from nbdist.wire.messages.cells import Interrupt
from nbdist.wire.questions.gathering import Arrive, Called, CallNow, CallOff, Gather
from nbdist.wire.questions.question import Done, NoAnswer, Question
from nbdist.wire.questions.stopping import Aim, Arm, Cut, Disarm, GetPosition, GetStack, Meet, StepsMade, Strand
from nbdist.worker.cell.interrupts import InterruptGate
from nbdist.worker.cell.keyboard import Keyboard
from nbdist.worker.control.control_thread import LaterWork, Waker
from nbdist.worker.control.slow_questions import Work
from nbdist.worker.groups.process_groups import Collectives
from nbdist.worker.recovery.position import PositionProbe
from nbdist.worker.recovery.step_call import StepCall, Tell
from nbdist.worker.recovery.step_stop import StepCounter


class RankStop:
    """Ends the cell that runs on this rank. The control thread asks; the main thread is the one that stops.

    Args:
        collectives: The process groups.
        gate: Raises KeyboardInterrupt on the main thread.
        keyboard: What waits for the user.
        waker: Wakes the control thread when `due` has a new answer.

    Attributes:
        steps: The optimizer steps of the cell that runs.
        answers: What answers the controller at once, by the type of question.
        later: What answers when the main thread has got there.
    """

    def __init__(self, collectives: Collectives, gate: InterruptGate, keyboard: Keyboard, waker: Waker) -> None:
        self.steps = StepCounter(waker.wake, after_step=self._after_step, on_stop=gate.give)
        self._collectives = collectives
        self._gate = gate
        self._events = step_events.of_this_thread()
        self._progress = PositionProbe(collectives, gate, keyboard)
        self.answers: dict[type[Question[Any]], Work] = dict(
            [
                GetPosition.by(self._progress.look),
                GetStack.by(self._progress.stack),
                Arm.by(self._arm),
                Aim.by(self._aim),
                Meet.by(self._meet),
                Disarm.by(self._disarm),
                Cut.by(self._cut),
                Strand.by(self._strand),
                Gather.by(self._gather),
                CallOff.by(self._call_off),
            ]
        )
        self.later: dict[type[Question[Any]], LaterWork] = {Arrive: self._arrive, CallNow: self._call}

    # --- what the main thread asks

    @property
    def running(self) -> int:
        """The serial number of the cell that runs, 0 for none."""
        return self._gate.running

    def open(self, serial: int, *, once: bool) -> contextlib.AbstractContextManager[None]:
        """Let requests for this cell interrupt the body. See `InterruptGate.open`."""
        return self._gate.open(serial, once=once, held=self._held)

    def undisturbed(self) -> contextlib.AbstractContextManager[None]:
        """Hold interrupts back in the body. See `InterruptGate.undisturbed`."""
        return self._gate.undisturbed()

    def was_asked(self, serial: int) -> bool:
        """Return whether a cell has been asked to stop."""
        return self._gate.was_asked(serial)

    def was_given(self, serial: int) -> bool:
        """Return whether the interrupt has reached the code of a cell."""
        return self._gate.was_given(serial)

    def has_cut(self, serial: int) -> bool:
        """Return whether collectives of a cell fail because it was asked to stop."""
        return self._gate.was_asked(serial) and self._collectives.is_cut

    # --- when the control thread is to look

    def due(self) -> float | None:
        """Return the seconds until `tick` should be called; None: nothing is under way."""
        return min((due for due in (self._gate.resend_due(), self.steps.overdue()) if due is not None), default=None)

    def tick(self) -> None:
        """Go on with what a cell has not heeded."""
        if self._gate.resend():
            self._progress.note_moves()
        if self.steps.overdue() == 0.0:
            self._interrupt_body()

    # --- the rungs

    def _arm(self, question: Arm) -> StepsMade:
        if self._gate.is_settled(question.serial):  # it is stopping in its own way
            return StepsMade(count=0, stepping=False, running=False)
        return self.steps.arm(question.serial)

    def _aim(self, order: Aim) -> Done:
        self.steps.aim(order.serial, order.target)
        return Done()

    def _disarm(self, order: Disarm) -> Done:
        self.steps.disarm(order.serial)
        return Done()

    def interrupt(self, order: Interrupt) -> None:
        """Interrupt a cell, now or when it starts."""
        if self._gate.is_settled(order.serial) and not order.now:
            return
        try:
            self._progress.mark()
        finally:
            self._gate.request(order.serial, again=order.now)

    def _meet(self, order: Meet) -> Done:
        if self._gate.is_settled(order.serial):
            return Done()
        self.steps.aim(order.serial, order.target, hurry=True)
        if self.steps.count >= order.target:
            self._progress.mark()
            self._gate.request(order.serial)
        return Done()

    def _held(self) -> bool:
        """Return whether an interrupt has to wait: a step is applied, or the loop's body has yet to count it."""
        return self._events.in_step or self.steps.finishing()

    def _after_step(self) -> None:
        """Let the loop count a step for which an interrupt was held back, then stop. On the main thread."""
        if self._gate.pending and not self.steps.finishing():
            serial = self._gate.running
            self.steps.arm(serial)
            self.steps.aim(serial, self.steps.count)

    def _interrupt_body(self) -> None:
        """Interrupt the loop's body where it is, because it does not end, if the cell was to stop."""
        serial = self._gate.running
        if self.steps.expire():
            self._gate.request(serial)

    def _cut(self, order: Cut) -> Done:
        stuck = self._progress.stands_still() and not self._gate.is_settled(order.serial)
        if self._gate.running == order.serial and (order.force or stuck):
            self._collectives.cut()
        return Done()

    def _strand(self, order: Strand) -> Done:
        if self._gate.running == order.serial:
            self._collectives.stranded = order.why
            self._gate.request(order.serial)
            if not self._progress.in_meeting():
                self._collectives.cut()
        return Done()

    # --- a call between two steps

    def _gather(self, question: Gather) -> StepsMade:
        if self._gate.was_asked(question.serial):
            return StepsMade(count=0, stepping=False, running=False)
        return self.steps.gather(question.serial)

    def _arrive(self, order: Arrive, tell: Tell) -> None:
        self.steps.arrive(order.serial, order.target, StepCall(order.patience, tell))

    def _call(self, order: CallNow, tell: Tell) -> None:
        call = self.steps.gathered(order.serial)
        if call is None:
            tell(NoAnswer("the cell has ended, or is being stopped"))
        else:
            call.order(lambda: _call_pickled(order.call), tell)

    def _call_off(self, order: CallOff) -> Done:
        self.steps.call_off(order.serial, "another rank did not come")
        return Done()


def _call_pickled(call: bytes) -> Called:
    function, arguments = pickle.loads(call)
    return Called(pickle.dumps(function(*arguments)))
