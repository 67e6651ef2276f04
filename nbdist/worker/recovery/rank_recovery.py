"""How this rank goes on after a stop, a failure, or the death of another: the rank's side of the controller's recovery.

Owns what is exact, and what a cell has left: it reports where this rank stands, in the control thread, and does what
Recover, Adopt and Resize say, on the main thread. Independent of the shell and of sockets.
"""

from __future__ import annotations

from collections.abc import Callable, MutableMapping
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from nbdist.metrics.events import step_events
from nbdist.train import active_training
from nbdist.wire.messages.cells import Failure, InOrder, Recover
from nbdist.wire.messages.healing import Adopt, Resize
from nbdist.wire.messages.rank_processes import RankSetup
from nbdist.wire.questions.question import Question
from nbdist.wire.questions.stopping import Forbid, Forbidden, GetState, RankState
from nbdist.worker.control.slow_questions import Work
from nbdist.worker.groups import deepspeed_state
from nbdist.worker.groups.default_group import DefaultGroup
from nbdist.worker.groups.process_groups import Collectives
from nbdist.worker.groups.resized_groups import ResizedGroups
from nbdist.worker.recovery import reset_models
from nbdist.worker.recovery.exact import ExactState
from nbdist.worker.recovery.random_record import RandomRecord
from nbdist.worker.recovery.rank_stop import RankStop
from nbdist.worker.recovery.resizing import take_groups

if TYPE_CHECKING:
    from torch.nn import Module

_COUNTER = "num_batches_tracked"  # of a BatchNorm layer
_STATISTICS_STAY = "BatchNorm statistics of the lost step are kept; start with `--exact` to restore them"


class RankRecovery:
    """Puts in order what a cell has left.

    Args:
        setup: What this rank is.
        collectives: The process groups.
        group: The default one.
        stop: What ends cells.

    Attributes:
        answers: What answers the controller at once, by the type of question.
    """

    def __init__(self, setup: RankSetup, collectives: Collectives, group: DefaultGroup, stop: RankStop) -> None:
        self._collectives = collectives
        self._group = group
        self._stop = stop
        self._steps = stop.steps
        self._setup = setup
        self._resized = ResizedGroups()  # of the last change; groups of before, until models have let go of them
        self._news: list[str] = []  # about it
        self._events = step_events.of_this_thread()
        self._folder = setup.folder  # goes with this process; what lies beside it, with the session
        self._joining = setup.newcomer
        self._settle: Callable[[], None] = lambda: None
        self._exact = ExactState() if setup.options.exact else None
        self._statistics = BatchNormStatistics()
        self._serial = 0  # the newest cell, and how it ended
        self._failure: Failure | None = None
        self._in_step = False
        self.answers: dict[type[Question[Any]], Work] = dict(
            [
                GetState.by(self._state),
                Forbid.by(lambda question: Forbidden(collectives.forbid(question.groups))),
            ]
        )

    def install(self) -> None:
        """See the groups that are made and the steps that are taken from now on."""
        self._collectives.watch()
        reset_models.let_groups_outlive_ddp()
        self._steps.install()
        self._statistics.install()
        self._events.listen(after=self._statistics.mark)
        if self._exact is not None:
            self._events.listen(before=self._exact.before_step, after=self._exact.snapshot)
            if not self._joining:
                self._exact.record = self._random_record()

    def begin(self, serial: int) -> None:
        """Begin a cell. On the main thread, where nothing interrupts yet."""
        self._serial, self._failure, self._in_step = serial, None, False
        self._collectives.begin()
        self._collectives.timeouts.begin(serial)
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
        self._collectives.timeouts.resume()
        self._failure, self._in_step = failure, in_step
        if self._exact is not None and self._was_interrupted() and not self._stopped_at_step():
            self._exact.restore()

    def _state(self, question: GetState) -> RankState:
        """Return where this rank stands after the cell. In the control thread, while the main thread runs nothing."""
        current = question.serial == self._serial
        if current and self._stop.was_asked(question.serial) and not self._steps.count:
            reset_models.begin_forwards_alike()  # with a step, the models are reset anyway
        return RankState(
            groups=self._collectives.groups(current=current),
            count=self._collectives.numbered,
            current=current,
            caught=current and self._caught(),
            steps=self._steps.count if current else 0,
            rescheduled=current and self._steps.rescheduled(),
            lifetime=self._exact.steps if self._exact is not None else 0,
            stopped=self._steps.stopped if current and self._stopped_at_step() else None,
            recipes=self._collectives.recipes() if question.recipes else {},
        )

    def recover(self, task: Recover) -> InOrder:
        """Renew groups and reset models, together with the other ranks. On the main thread."""
        failure = ""
        keep_buckets = False
        try:
            self._collectives.renew(task.generation, task.renew, task.stale, task.count)
            if task.regroup:
                self._group.make_again(task.generation)
            if task.reset:
                topic = f"buckets settled, generation {task.generation}, cell {task.serial}"  # never voted on before
                keep_buckets = self._collectives.agree(
                    topic, reset_models.buckets_settled(), task.ranks, self._setup.rank
                )
        except Exception as error:  # the ranks live on, and the user is told
            failure = f"{type(error).__name__}: {error}".splitlines()[0]
        if not task.serial:  # a heal: another rank has come
            deepspeed_state.forget_ranks()
        elif task.stale or task.regroup:
            deepspeed_state.forget_groups()
        self._collectives.lose(task.lost, task.dead)
        if failure or task.lost:
            self._collectives.drop_stand_ins(failure or "a rank has died")
        if not task.reset:
            return InOrder(failure)
        report = reset_models.reset_models(keep_buckets=keep_buckets, moved=self._statistics.moved)
        notes = [*self._news, *report.notes]
        self._resized, self._news = ResizedGroups(), []
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
            self._collectives.adopt(task.recipes, self._setup.rank)
            active_training.newcomer = True
            self._group.adopted()
        except Exception as error:  # of any backend; who heals decides what to do without this rank
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
            self._resized, self._news = take_groups(self._collectives, setup, task)
            self._group.adopted()
        except Exception as error:  # likewise
            return InOrder(f"{type(error).__name__}: {error}".splitlines()[0])
        return InOrder()

    def _caught(self) -> bool:
        """Return whether what went wrong in the cell may have caught a model in the middle of a step."""
        if self._stopped_at_step():
            return False
        broken = self._collectives.broken().values()
        if broken and reset_models.communicate_in(broken):  # it may have been in a step whose error the cell has caught
            return True
        return self._in_step or (self._was_interrupted() and self._steps.count > 0)

    def _was_interrupted(self) -> bool:
        return self._failure is not None and self._failure.kind in ("interrupted", "stopped")

    def _stopped_at_step(self) -> bool:
        """Return whether the cell ended between two steps, by our own stop."""
        return self._failure is not None and self._failure.kind == "stopped"


class BatchNormStatistics:
    """Which BatchNorm layers have counted a batch since the last optimizer step: only these has a lost step moved.

    Knows the layers that this process has built, and nothing of others, such as copies. Looks at a counter of each
    layer, and at no value. All on the main thread.
    """

    def __init__(self) -> None:
        self._seen: MutableMapping[Module, tuple[int, int] | None] = WeakKeyDictionary()

    def install(self) -> None:
        """Know of the layers that are built from now on. InstanceNorm is none of them: it does not count."""
        from torch.nn.modules.module import register_module_buffer_registration_hook

        from nbdist.train.structure.blocks import is_batch_norm

        def note(module: Module, name: str, buffer: object) -> None:
            if name == _COUNTER and is_batch_norm(module):
                self._seen[module] = None

        register_module_buffer_registration_hook(note)

    def mark(self, *_: object) -> None:
        """Treat what has been counted until now as part of whole steps."""
        for module in list(self._seen):
            self._seen[module] = _stamp(module)

    def moved(self, module: Module) -> bool:
        """Return whether a layer has counted a batch since the last mark; True where that is not known."""
        seen = self._seen.get(module)
        return seen is None or seen != _stamp(module)


def _stamp(module: Module) -> tuple[int, int] | None:
    """Return a stamp that changes when a batch is counted."""
    counter = module._buffers.get(_COUNTER)
    return None if counter is None or counter.is_inference() else (id(counter), counter._version)
