"""How this rank is stopped, and how it goes on: the rank's side of the controller's ladder and recovery.

Owns the step counter, the process groups and what is exact; answers what the controller asks of them, in the control
thread, and does what Recover says, on the main thread. Knows nothing of the shell or of sockets.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from nbdist.metrics.events import step_events
from nbdist.train import active_training
from nbdist.wire.messages.cells import Failure, InOrder, Recover
from nbdist.wire.messages.healing import Adopt, Resize
from nbdist.wire.messages.rank_processes import RankSetup
from nbdist.wire.questions.question import Done
from nbdist.wire.questions.stopping import (
    Aim,
    Arm,
    Cut,
    Disarm,
    Forbid,
    Forbidden,
    GetPosition,
    GetStack,
    GetState,
    Meet,
    RankState,
    StepsMade,
    Strand,
)
from nbdist.worker.cell.keyboard import Keyboard
from nbdist.worker.control.control_thread import ControlThread
from nbdist.worker.groups.new_world import NewWorld
from nbdist.worker.groups.process_groups import Collectives
from nbdist.worker.recovery import reset_models
from nbdist.worker.recovery.batchnorm import Statistics
from nbdist.worker.recovery.exact import ExactState
from nbdist.worker.recovery.position import PositionProbe
from nbdist.worker.recovery.random_record import RandomRecord
from nbdist.worker.recovery.resizing import take_groups
from nbdist.worker.recovery.step_stop import StepCounter

_STATISTICS_STAY = "BatchNorm statistics of the lost step are kept; start with `--exact` to restore them"


class RankRecovery:
    """Stops the cell that runs, and puts in order what a failed one has left.

    Args:
        setup: What this rank is.
        control: Asks for the stops; from now on it also answers the questions that belong to them.
        keyboard: What waits for the user.

    Attributes:
        collectives: The process groups.
        make_group_again: Makes the default group, given a number that no making of it has had before.
        adopted: Called when this rank has taken a dead one's place in its groups.
    """

    def __init__(self, setup: RankSetup, control: ControlThread, keyboard: Keyboard) -> None:
        self.collectives = Collectives(setup.incarnation, setup.store)
        self.make_group_again: Callable[[int], None] = lambda attempt: None
        self.adopted: Callable[[], None] = lambda: None
        self._setup = setup
        self._world = NewWorld()  # of the last change; groups of before, until models have let go of them
        self._news: list[str] = []  # about it
        self._control = control
        self._events = step_events.of_this_thread()
        self._steps = StepCounter(control.wake)
        self._folder = setup.folder  # goes with this process; what lies beside it, with the session
        self._joining = setup.newcomer
        self._settle: Callable[[], None] = lambda: None
        self._exact = ExactState() if setup.options.exact else None
        self._statistics = Statistics()
        self._progress = PositionProbe(self.collectives, control.gate, keyboard)
        self._serial = 0  # the newest cell, and how it ended
        self._failure: Failure | None = None
        self._in_step = False
        control.gate.held = lambda: self._events.in_step or self._steps.finishing()
        control.on_interrupt = self._progress.mark
        control.on_resend = self._progress.note_moves
        control.overdue = self._steps.overdue
        control.on_overdue = self._interrupt_body
        control.answers |= dict(
            [
                GetPosition.by(self._progress.look),
                GetStack.by(self._progress.stack),
                Arm.by(self._arm),
                Aim.by(self._aim),
                Meet.by(self._meet),
                Disarm.by(self._disarm),
                Cut.by(self._free),
                Strand.by(self._strand),
                GetState.by(self._state),
                Forbid.by(lambda question: Forbidden(self.collectives.forbid(question.groups))),
            ]
        )

    def install(self) -> None:
        """See the groups that are made and the steps that are taken from now on."""
        self.collectives.watch()
        reset_models.let_groups_outlive_ddp()
        self._steps.install()
        self._steps.after_step = self._after_step
        self._steps.on_stop = self._control.gate.give
        self._statistics.install()
        self._events.listen(after=self._statistics.mark)
        if self._exact is not None:
            self._events.listen(before=self._exact.before_step, after=self._exact.snapshot)
            if not self._joining:
                self._exact.record = self._random_record()

    def begin(self, serial: int) -> None:
        """Begin a cell. On the main thread, where nothing interrupts yet."""
        self._serial, self._failure, self._in_step = serial, None, False
        self.collectives.begin()
        self.collectives.timeouts.begin(serial)
        self._steps.begin(serial)
        self._statistics.mark()
        if self._exact is not None:
            self._exact.begin()

    def end(self, serial: int, failure: Failure | None, in_step: bool) -> None:
        """End the cell; nothing interrupts any more.

        Args:
            serial: The cell.
            failure: Why, if it failed.
            in_step: Whether it failed in the middle of a training step.
        """
        self._steps.end(serial)
        self.collectives.timeouts.resume()
        self._failure, self._in_step = failure, in_step
        if self._exact is not None and self._was_interrupted() and not self._stopped_at_step():
            self._exact.restore()

    # --- stopping, in the control thread

    def _arm(self, question: Arm) -> StepsMade:
        if self._control.gate.is_settled(question.serial):  # it is stopping in its own way
            return StepsMade(count=0, stepping=False, running=False)
        return self._steps.arm(question.serial)

    def _aim(self, order: Aim) -> Done:
        self._steps.aim(order.serial, order.target)
        return Done()

    def _meet(self, order: Meet) -> Done:
        if self._control.gate.is_settled(order.serial):
            return Done()
        self._steps.aim(order.serial, order.target, hurry=True)
        if self._steps.count >= order.target:
            self._progress.mark()
            self._control.gate.request(order.serial)
        return Done()

    def _disarm(self, order: Disarm) -> Done:
        self._steps.disarm(order.serial)
        return Done()

    def _free(self, order: Cut) -> Done:
        gate = self._control.gate
        if gate.running == order.serial and (
            order.force or (self._progress.stands_still() and not gate.is_settled(order.serial))
        ):
            self.collectives.cut()
        return Done()

    def _strand(self, order: Strand) -> Done:
        if self._control.gate.running == order.serial:
            self.collectives.stranded = order.why
            self._control.gate.request(order.serial)
            if not self._progress.in_meeting():
                self.collectives.cut()
        return Done()

    def _interrupt_body(self) -> None:
        """Interrupt the loop's body where it is, because it does not end."""
        serial = self._control.gate.running
        self._steps.disarm(serial)
        self._control.gate.request(serial)

    def _after_step(self) -> None:
        """Let the loop count a step for which an interrupt was held back, then stop. On the main thread."""
        if self._control.gate.pending and not self._steps.finishing():
            serial = self._control.gate.running
            self._steps.arm(serial)
            self._steps.aim(serial, self._steps.count)

    # --- going on

    def _state(self, question: GetState) -> RankState:
        """Return where this rank stands after the cell. In the control thread, while the main thread runs nothing."""
        current = question.serial == self._serial
        if current and self._control.gate.was_asked(question.serial) and not self._steps.count:
            reset_models.begin_forwards_alike()  # with a step, the models are reset anyway
        return RankState(
            groups=self.collectives.groups(current=current),
            count=self.collectives.numbered,
            current=current,
            caught=current and self._caught(),
            steps=self._steps.count if current else 0,
            rescheduled=current and self._steps.rescheduled(),
            lifetime=self._exact.steps if self._exact is not None else 0,
            stopped=self._steps.stopped if current and self._stopped_at_step() else None,
            recipes=self.collectives.recipes() if question.recipes else {},
        )

    def recover(self, task: Recover) -> InOrder:
        """Renew groups and reset models, together with the other ranks. On the main thread."""
        failure = ""
        keep_buckets = False
        try:
            self.collectives.renew(task.generation, task.renew, task.stale, task.count)
            if task.regroup:
                self.make_group_again(task.generation)
            if task.reset:
                topic = f"buckets settled, generation {task.generation}, cell {task.serial}"  # never voted on before
                keep_buckets = self.collectives.agree(
                    topic, reset_models.buckets_settled(), task.ranks, self._setup.rank
                )
        except Exception as error:  # the ranks live on, and the user is told
            failure = f"{type(error).__name__}: {error}".splitlines()[0]
        self.collectives.lose(task.lost, task.dead)
        if failure or task.lost:
            self.collectives.drop_stand_ins(failure or "a rank has died")
        if not task.reset:
            return InOrder(failure)
        report = reset_models.reset_models(keep_buckets=keep_buckets, moved=self._statistics.moved)
        notes = [*self._news, *report.notes]
        self._world, self._news = NewWorld(), []
        if self._joining:
            notes = notes + self._take_over(task.steps)
        elif self._exact is not None:
            notes = notes + (self._exact.restore() if task.serial else [])  # a heal follows no cell of this rank's
        elif report.statistics_stay:
            notes = [*notes, _STATISTICS_STAY]
        return InOrder(failure, report.gradients, notes)

    def _take_over(self, steps: int) -> list[str]:
        """Belong to the others from now on, with the random numbers of the dead rank whose place this one has."""
        self._settle = self._events.listen(after=self._settled)
        record = self._random_record() if self._exact is not None else None
        self._joining = False
        notes = self._exact.resume(steps, record) if self._exact is not None and record is not None else []
        return [f"rank {self._setup.rank}: {note}" for note in notes]

    def _settled(self, _: object) -> None:
        """Be no newcomer any more: it trains with the others."""
        active_training.newcomer = False
        self._settle()

    def _random_record(self) -> RandomRecord | None:
        if not self._folder:
            return None
        try:
            return RandomRecord(Path(self._folder).with_name(f"random-{self._setup.slot}"), new=not self._joining)
        except OSError:  # no room there: a newcomer begins with random numbers of its own
            return None

    def adopt(self, task: Adopt) -> InOrder:
        """Take the place of a dead rank in its groups. On the main thread."""
        try:
            self.collectives.adopt(task.recipes, self._setup.rank)
            active_training.newcomer = True
            self.adopted()
        except Exception as error:
            return InOrder(f"{type(error).__name__}: {error}".splitlines()[0])
        return InOrder()

    def resize(self, setup: RankSetup, task: Resize) -> InOrder:
        """Become one of another number of ranks. On the main thread.

        Args:
            setup: What this rank is from now on.
            task: The order.
        """
        self._setup = setup
        try:
            self._world, self._news = take_groups(self.collectives, setup, task)
            self.adopted()
        except Exception as error:
            return InOrder(f"{type(error).__name__}: {error}".splitlines()[0])
        return InOrder()

    def _caught(self) -> bool:
        """Return whether what went wrong in the cell may have caught a model in the middle of a step."""
        if self._stopped_at_step():
            return False
        broken = self.collectives.broken().values()
        if broken and reset_models.communicate_in(broken):  # it may have been in a step whose error the cell has caught
            return True
        return self._in_step or (self._was_interrupted() and self._steps.count > 0)

    def _was_interrupted(self) -> bool:
        return self._failure is not None and self._failure.kind in ("interrupted", "stopped")

    def _stopped_at_step(self) -> bool:
        """Return whether the cell ended between two steps, by our own stop."""
        return self._failure is not None and self._failure.kind == "stopped"
