"""How this rank is stopped, and how it goes on: the rank's side of the controller's ladder and recovery.

Owns the step counter, the process groups and what is exact; answers what the controller asks of them, in the control
thread, and does what Recover says, on the main thread. Knows nothing of the shell or of sockets.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from nbdist.wire.cells import Failure, InOrder, Recover
from nbdist.wire.processes import RankSetup
from nbdist.worker.control import ControlThread
from nbdist.worker.groups.process_groups import Collectives
from nbdist.worker.recovery import reset_models
from nbdist.worker.recovery.batchnorm import Statistics
from nbdist.worker.recovery.exact import ExactState
from nbdist.worker.recovery.position import Progress
from nbdist.worker.recovery.step_stop import StepCounter


class Recovery:
    """Stops the cell that runs, and puts in order what a failed one has left.

    Args:
        setup: What this rank is.
        control: Asks for the stops; from now on it also answers the questions that belong to them.

    Attributes:
        collectives: The process groups.
        make_group_again: Makes the default group, given a number that no making of it has had before.
    """

    def __init__(self, setup: RankSetup, control: ControlThread) -> None:
        self.collectives = Collectives(setup.epoch, setup.store_port)
        self.make_group_again: Callable[[int], None] = lambda attempt: None
        self._rank = setup.rank
        self._control = control
        self._steps = StepCounter(control.wake)
        self._exact = ExactState() if setup.options.exact else None
        self._statistics = Statistics()
        self._progress = Progress(self.collectives, control.gate)
        self._serial = 0  # the newest cell, and how it ended
        self._failure: Failure | None = None
        self._in_step = False
        control.gate.held = lambda: self._steps.in_step or self._steps.finishing()
        control.on_interrupt = self._progress.mark
        control.overdue = self._steps.overdue
        control.on_overdue = self._interrupt_body
        control.answers |= {
            "progress": self._progress.look,
            "stack": self._progress.stack,
            "arm": self._steps.arm,
            "aim": self._aim,
            "meet": self._meet,
            "disarm": self._disarm,
            "cut": self._cut,
            "strand": self._strand,
            "state": self._state,
            "forbid": self.collectives.forbid,
        }

    def install(self) -> None:
        """See the groups that are made and the steps that are taken from now on."""
        self.collectives.watch()
        reset_models.let_groups_outlive_ddp()
        self._steps.install()
        self._steps.after_step = self._after_step
        self._statistics.install()
        self._steps.on_step.append(self._statistics.mark)
        if self._exact is not None:
            self._steps.on_step.append(self._exact.snapshot)

    def begin(self, serial: int) -> None:
        """A cell begins. On the main thread, where nothing interrupts yet."""
        self._serial, self._failure, self._in_step = serial, None, False
        self.collectives.begin()
        self._steps.begin(serial)
        self._statistics.mark()
        if self._exact is not None:
            self._exact.begin()

    def end(self, serial: int, failure: Failure | None, in_step: bool) -> None:
        """It has ended; nothing interrupts any more.

        Args:
            serial: The cell.
            failure: Why, if it failed.
            in_step: Whether it failed in the middle of a training step.
        """
        self._steps.end(serial)
        self._failure, self._in_step = failure, in_step
        if self._exact is not None and self._was_interrupted() and not self._stopped_at_step():
            self._exact.restore()

    # --- stopping, in the control thread

    def _aim(self, serial: int, target: int) -> dict[str, Any]:
        self._steps.aim(serial, target)
        return {}

    def _meet(self, serial: int, target: int) -> dict[str, Any]:
        """Interrupt the cell, but not before it has made a step that others have made."""
        self._steps.aim(serial, target, hurry=True)
        if self._steps.count >= target:
            self._progress.mark()
            self._control.gate.request(serial)
        return {}

    def _disarm(self, serial: int) -> dict[str, Any]:
        self._steps.disarm(serial)
        return {}

    def _cut(self, serial: int, force: bool) -> dict[str, Any]:
        """Free the main thread from a collective."""
        if self._control.gate.running != serial or not (force or self._progress.stands_still()):
            return {"groups": []}
        return {"groups": self.collectives.cut()}

    def _strand(self, serial: int, why: str) -> dict[str, Any]:
        """The main thread waits for what can't happen any more: free it; the reason becomes its error."""
        if self._control.gate.running == serial:
            self.collectives.stranded = why
            self._control.gate.request(serial)
            if not self._progress.in_meeting():
                self.collectives.cut()
        return {}

    def _interrupt_body(self) -> None:
        """The body of the loop does not end: interrupt it where it is."""
        serial = self._control.gate.running
        self._steps.disarm(serial)
        self._control.gate.request(serial)

    def _after_step(self) -> None:
        """An interrupt was held back until the step was whole: let the loop count it, then stop. On the main thread."""
        if self._control.gate.pending and not self._steps.finishing():
            serial = self._control.gate.running
            self._steps.arm(serial)
            self._steps.aim(serial, self._steps.count)

    # --- going on

    def _state(self, serial: int) -> dict[str, Any]:
        """Where this rank stands after the cell. In the control thread, while the main thread runs nothing."""
        current = serial == self._serial
        if current and self._control.gate.was_asked(serial) and not self._steps.count:
            reset_models.begin_forwards_alike()  # with a step, the models are reset anyway
        return self.collectives.state(current=current) | {
            "current": current,
            "caught": current and self._caught(),
            "steps": self._steps.count if current else 0,
            "stopped": self._steps.stopped if current and self._stopped_at_step() else None,
        }

    def recover(self, task: Recover) -> InOrder:
        """Renew groups and reset models, together with the other ranks. On the main thread."""
        failure = ""
        keep_buckets = False
        try:
            self.collectives.renew(task.generation, task.renew, task.stale, task.count)
            if task.regroup:
                self.make_group_again(task.generation)
            if task.reset:
                topic = f"buckets settled after {task.serial}"
                keep_buckets = self.collectives.agree(topic, reset_models.buckets_settled(), task.ranks, self._rank)
        except Exception as error:  # the ranks live on, and the user is told
            failure = f"{type(error).__name__}: {error}".splitlines()[0]
        self.collectives.lose(task.lost, task.dead)
        if not task.reset:
            return InOrder(failure)
        report = reset_models.reset_models(keep_buckets=keep_buckets, moved=self._statistics.moved)
        notes = report.notes
        if self._exact is not None:
            notes = [note for note in notes if note != reset_models.STATISTICS_STAY] + self._exact.restore()
        return InOrder(failure, report.gradients, notes)

    def _caught(self) -> bool:
        """Whether the cell's failure caught a model in the middle of a step."""
        if self._stopped_at_step():
            return False
        return self._in_step or (self._was_interrupted() and self._steps.count > 0)

    def _was_interrupted(self) -> bool:
        return self._failure is not None and self._failure.kind in ("interrupted", "stopped")

    def _stopped_at_step(self) -> bool:
        """Whether the cell ended between two steps, by our own stop."""
        return self._failure is not None and self._failure.kind == "stopped"
