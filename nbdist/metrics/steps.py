"""What training steps take, live and without a change to the loop: time, FLOPs, waiting for data.

A step, here, lasts from the end of one `optimizer.step()` to the end of the next, so
accumulation is part of it; `live` counts one of each shape. Works in any process, with or without ranks.

A step's shape is what its backward passes and batches look like, and whose parameters it moves.
"""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from collections import Counter, deque
from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec
import torch

from nbdist.metrics.compute import graphs, torch_parts
from nbdist.metrics.compute.live import LiveCounts, Shape
from nbdist.metrics.compute.products import Multiplication
from nbdist.metrics.counted_steps import CountedSteps
from nbdist.metrics.events import data_parallel, evaluation, loading, passes, step_events
from nbdist.metrics.events.clock import Clock, DeviceClock, HostClock
from nbdist.metrics.events.listening import compiler
from nbdist.metrics.events.passes import PassReader
from nbdist.metrics.events.waits import CollectiveWaits
from nbdist.metrics.node.active_meter import current, measures, set_meter
from nbdist.metrics.node.energy import Spending
from nbdist.metrics.node.sample import StepSample
from nbdist.metrics.step_totals import (
    UNKNOWN,
    StepPart,
    TimedStep,
    Totals,
    beyond_usual_without_gradients,
    middle,
    seconds_of,
    training_of,
)

if TYPE_CHECKING:
    from torch.optim import Optimizer

_WINDOW = 512  # steps, at most
_WINDOW_STEPS, _WINDOW_SECONDS = 10, 5.0  # of a sample: whichever is more
LAP = 4096  # steps of a lap that are kept; of those before there are sums

_PASSES = 1000  # of one step, at most
_SHAPES = 1024  # whose usual time is remembered
_CHANGED = 0.2  # share of a shape's usual time, by which a step differs that is looked at more closely

# Steps are read in batches where nothing new is to be seen: code that runs once in each step finds the processor's
# caches full of the step's own data, and costs ten times what it costs when it runs often.
_AT_ONCE = 16  # steps of a lap, each of which is read as it ends
_BATCH, _BATCH_SECONDS = 16, 0.1  # steps that wait to be read at most, and how long
_PARTS = 256  # parts of a step that wait to be read at most: an evaluation may have one for each batch
_READING_FREE, _READING = 0.02, 0.001  # seconds, and share of the time, that reading whole graphs may take


@dataclass
class StepWork:
    """What the steps of the last lap that had some consisted of, for advice on them.

    Attributes:
        made: How many there were, those included that were not timed.
        seconds: Of one, stalls included.
        waiting: Share of it spent waiting for data; None: without a DataLoader.
        counted: Share of them whose work is known.
        products: Calls in one step, by what they multiply.
        not_counted: Operations without a formula that ran in counted steps.
        parameters: What their optimizers move, if these still exist.
        loaders: The DataLoaders that they took batches from.
        device: Where the products ran.
    """

    made: int
    seconds: float
    waiting: float | None
    counted: float
    products: dict[Multiplication, float]
    not_counted: list[str]
    parameters: list[torch.Tensor]
    loaders: dict[loading.LoaderKey, loading.LoaderUse]
    device: torch.device


class StepMeter:
    """Measures the training steps of the thread that starts it.

    >>> with StepMeter() as meter:
    ...     train(model, loader)
    ...     print(meter.sample())

    Nothing of it raises in the user's loop: what goes wrong makes values unknown, with the reason. Steps of a compiled
    `optimizer.step` are not seen, nor those that run inside a backward pass, one parameter after the other.
    """

    def __init__(self) -> None:
        self._impossible = False
        self._counts = LiveCounts()
        self._clock: Clock[TimedStep] = HostClock()
        self._device = torch.device("cpu")
        self._on_gpu = False
        self._window: deque[TimedStep] = deque(maxlen=_WINDOW)
        self._since_lap: deque[TimedStep] = deque()
        self._earlier = Totals()  # of the lap's steps before these
        self._steps = self._lap_steps = 0
        self._places: dict[int, data_parallel.Places] = {}  # of this lap, by the optimizer's number
        self._serials: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
        self._last_optimizer: Callable[[], object] = lambda: None  # a weak reference
        self._last_serial = 0
        self._gathered = TimedStep()
        self._unread: list[TimedStep] = []  # that have ended
        self._read_by = self._ended_at = 0.0  # when they are read at the latest, and when the last one ended
        self._is_calm = False  # nothing new has been seen lately, so that steps may wait to be read
        self._reader = PassReader()
        self._waits = CollectiveWaits()
        self._evaluations = evaluation.Evaluations(self._end_part)
        self._waited_within = 0.0  # for batches of what may be one
        self._parts = 0  # of steps, that have been timed apart
        self._events = step_events.of_this_thread()
        self._is_idle: Callable[[], bool] = lambda: True  # the device, when a batch is there
        self._unit = self._batch = ""
        self._last_shapes: Hashable = None  # of a batch
        self._thread = 0
        self._clock_is_off = False  # in this lap
        self._counted = CountedSteps()
        self._passes_elsewhere = 0  # of this lap, in other threads
        self._is_lap_over = False
        self._usual: dict[Shape, float] = {}  # seconds, of this lap
        self._ends: list[Callable[[], None]] = []
        self._spending = Spending()
        self._loaders = loading.LoaderUses()
        self._last: tuple[list[TimedStep], StepSample, loading.LoaderUses] | None = None  # of the last lap with steps

    def __enter__(self) -> StepMeter:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        """Measure from now on."""
        if self._ends:
            return
        if lacking := torch_parts.lacking():
            self._impossible = True
            self._counts.why = f"{lacking}, so steps can't be measured"
            return
        graphs.watch()
        self._waits.start()
        self._thread = threading.get_ident()
        self._events = step_events.of_this_thread()
        steps = self._events.listen(before=self._counts.enter_optimizer, after=self._see_end)
        self._ends = [steps, passes.listen(self._see_pass), loading.listen(self._see_batch)]
        self._ends.append(evaluation.listen(self._see_sign))

    def begin_cell(self) -> None:
        """Note that what the next lap spends begins here."""
        self._spending.begin()

    def stop(self) -> None:
        """Measure no longer. In the thread that has started it."""
        self._read_steps()
        self._counts.leave()
        self._waits.stop()
        for end in self._ends:
            end()
        self._ends = []

    # --- what is known

    def sample(self) -> StepSample:
        """Return the last steps. From any thread, at any time, in less than a millisecond."""
        if threading.get_ident() == self._thread:
            self._read_steps()
        recent: list[TimedStep] = []
        now = time.monotonic()
        for step in reversed(list(self._window)):
            if len(recent) >= _WINDOW_STEPS and now - step.at > _WINDOW_SECONDS:
                break
            recent.append(step)
        stalled = now - self._ended_at if recent and not self._is_lap_over else 0.0
        found = self._summary(self._steps, recent, stalled)
        return msgspec.structs.replace(found, in_cell=self._lap_steps)

    def lap(self) -> StepSample:
        """Return the steps since the last lap; time until the next step belongs to none. In the starting thread.

        Returns:
            `steps`: of this lap.
        """
        self._read_steps()
        self._counts.end_lap()
        self._note(self._clock.restart())
        self._time_counted()
        found = self._summary(self._lap_steps, list(self._since_lap), earlier=self._earlier)
        spent = self._spending.end() if found.steps else None
        counting = self._counted.took(middle(self._since_lap, training_of)) if self._since_lap else 0.0
        passes = 0 if self._lap_steps else len(self._gathered.passes) + self._passes_elsewhere
        found = msgspec.structs.replace(found, spent=spent, counting=counting, passes=passes)
        if self._since_lap:
            self._last = list(self._since_lap), found, self._loaders
        self._loaders = loading.LoaderUses()
        self._batch = ""
        self._places.clear()
        self._since_lap.clear()
        self._earlier = Totals()
        self._lap_steps = 0
        self._usual.clear()
        self._counted.end_lap()
        self._passes_elsewhere = 0
        self._clock_is_off = False
        self._is_lap_over = True
        self._is_calm = False
        self._events.forget()
        self._evaluations.cancel()
        self._gathered = TimedStep()
        self._reader.restart()
        self._waits.restart()
        return found

    def last_work(self) -> StepWork | None:
        """Return what the steps of the last lap that had some consisted of; None: there was none. In that thread."""
        if self._last is None:
            return None
        steps, sample, uses = self._last
        known = [found for step in steps if (found := self._counts.known.get(step.shape)) is not None]
        products: Counter[Multiplication] = Counter()
        for each in known:
            products.update(each.products)
        return StepWork(
            made=sample.steps,
            seconds=sample.seconds or 0.0,
            waiting=sample.waiting,
            counted=len(known) / len(steps),
            products={product: calls / len(known) for product, calls in products.items()},
            not_counted=sample.not_counted,
            parameters=self._trained_in(steps),
            loaders=dict(uses.used),
            device=known[-1].device if known else self._device,
        )

    def release(self) -> None:
        """Let go of what only advice on the last steps would need. In that thread."""
        if self._last is not None:
            _, _, uses = self._last
            uses.release()

    def _trained_in(self, steps: Sequence[TimedStep]) -> list[torch.Tensor]:
        """Return the parameters that the optimizers of these steps move."""
        return [parameter for optimizer, _ in self._alive(_makers(steps)) for parameter in _parameters_of(optimizer)]

    def _alive(self, serials: Collection[int]) -> list[tuple[Optimizer, int]]:
        return [(optimizer, serial) for optimizer, serial in list(self._serials.items()) if serial in serials]

    def _summary(
        self, made: int, steps: Sequence[TimedStep], stalled: float = 0.0, earlier: Totals | None = None
    ) -> StepSample:
        """Return what steps took: sums over all their time.

        Args:
            made: How many there have been.
            steps: The last of them.
            stalled: Seconds since the last one ended. They count if they are more than any of these steps took.
            earlier: Sums over those before.
        """
        if not steps:
            return StepSample(steps=made, impossible=self._impossible, why=self._why_nothing(made))
        totals = (earlier or Totals()).with_steps(steps, self._counts.known)
        found = totals.sample(made, stalled, evaluates=self._evaluations.seems_under_way)
        batch = self._batch or found.batch
        unknown = self._counts.why or self._counts.hindrance or "no step of this shape has been counted yet"
        return msgspec.structs.replace(
            found,
            typical=middle(steps, seconds_of),
            without_gradients=beyond_usual_without_gradients(totals, steps),
            unit=self._unit if totals.units else found.unit,
            batch=data_parallel.shared_batch(batch, [self._places[of] for of in _makers(steps) & self._places.keys()]),
            why=found.why if totals.works else unknown,
        )

    def _why_nothing(self, made: int) -> str:
        if self._counts.why:
            return self._counts.why
        if self._clock_is_off:
            return "the clock ran backwards"
        if made:
            return "too few steps: the first begins, the second is counted, from the third on they are timed"
        if self._gathered.passes:
            return "no step was seen: one that is compiled, inside a backward pass, or without an optimizer can't be"
        if self._passes_elsewhere:
            return "backward passes ran in another thread than the cell's, and steps there are not measured"
        return "no step yet"

    # --- in the user's loop, so nothing may be raised

    def _see_end(self, optimizer: Optimizer) -> None:
        if compiler() not in (None, False):
            return  # it runs within a compiled region, where nothing can be counted
        try:
            if self._on_gpu and torch.cuda.is_current_stream_capturing():
                return
            if self._last_optimizer() is not optimizer:
                self._turn_to(optimizer)
            self._end_step()
        except Exception as error:  # measuring must not end the user's step
            self._fail("a step could not be measured", error)

    def _see_pass(self, outputs: Sequence[Any]) -> None:
        if threading.get_ident() != self._thread:
            self._passes_elsewhere += 1
            return
        gathered, reader = self._gathered, self._reader
        passes = gathered.passes
        if self._evaluations.has_signs:
            self._go_on_training()
        if len(passes) > _PASSES:
            return  # nobody steps
        try:
            if not self._is_calm:
                self._counts.leave_failed()
                self._counts.give_up_postponed()
            gathered.passes = (*passes, reader.read(outputs))
            if self._loaders.used:
                self._loaders.see_pass(reader.oldest)
            if reader.suspects:
                self._read_steps()
                self._distrust(reader.suspects)
        except Exception as error:  # as above
            self._fail("a backward pass could not be read", error)

    def _go_on_training(self) -> None:
        """Have what looked like the beginning of an evaluation, and did not end, count as part of the training."""
        if self._evaluations.cancel() and self._waited_within:
            self._gathered.waiting = (self._gathered.waiting or 0.0) + self._waited_within
        self._waited_within = 0.0

    def _see_batch(self, seconds: float | None, batch: Any) -> None:
        """Note a batch; what a device still did all the time that the loop waited for it was no waiting."""
        if threading.get_ident() != self._thread:
            return
        if seconds is None:
            with contextlib.suppress(Exception):  # an iterator of somebody's own kind
                self._loaders.ask(batch)  # the iterator, as there is no batch yet
                if self._loaders.is_training:
                    self._evaluations.end(trains=True)
                elif self._lap_steps and self._loaders.is_evaluating and not self._evaluations.under_way:
                    self._evaluations.begin(sure=True)
            with contextlib.suppress(Exception):  # no event can be made: nothing is hidden then
                self._is_idle = self._clock.mark()
            return
        if not self._is_idle():
            seconds = 0.0
        self._loaders.take(max(0.0, seconds))
        self._counts.leave_failed()
        gathered = self._gathered
        if not self._loaders.is_training and self._evaluations.under_way:
            self._waited_within += max(0.0, seconds)
        else:
            gathered.waiting = (gathered.waiting or 0.0) + max(0.0, seconds)
        with contextlib.suppress(Exception):  # a batch of somebody's own kind
            if self._lap_steps and not self._loaders.is_training:
                self._evaluations.begin(sure=True)
            self._batch = self._batch or loading.fingerprint(batch)
            found = loading.describe(batch)
            is_first = self._loaders.is_training and not (gathered.is_fed or gathered.passes)
            if is_first and self._counts.tells_of_wanted(found.shapes):
                self._read_steps()
                self._begin_count(lambda: self._counts.expect(found.shapes))
                self._is_calm = False
            elif self._loaders.is_training and self._counts.is_postponed:
                self._begin_count(self._counts.begin_postponed)
            gathered.is_fed = gathered.is_fed or self._loaders.is_training
            if found.shapes != self._last_shapes:
                self._reader.look_closely()
            self._last_shapes = found.shapes
            self._loaders.hold(found)
            self._unit = found.unit or self._unit

    def _begin_count(self, begin: Callable[[], None]) -> None:
        """Begin to count within a step, if that is worth it: its time so far is not part of what counting takes."""
        begin()
        if self._counts.under_way:
            self._gathered.waited_beside = self._gathered.waiting or 0.0
            self._clock.tick(StepPart(self._gathered, "training", beside=True), time.monotonic())

    def _see_sign(self, sign: evaluation.Sign, model: Any) -> None:
        """Note that gradients or a model are switched to what evaluations use, or back."""
        if threading.get_ident() != self._thread or not self._lap_steps or self._events.frame is not None:
            return
        if torch._C._current_graph_task_id() != -1:
            return
        try:
            if sign == "off":
                self._evaluations.begin()
            elif sign == "eval" and self._is_trained(model):
                self._evaluations.begin(sure=True)
            elif sign in ("on", "train"):
                if sign == "train" and self._evaluations.under_way and self._is_trained(model):
                    self._loaders.end_evaluation()
                self._evaluations.end(trains=sign == "train")
        except Exception as error:  # as above
            self._fail("an evaluation could not be timed", error)

    def _end_part(self, kind: evaluation.Part) -> None:
        """End a part of the step that is under way."""
        if self._on_gpu and torch.cuda.is_current_stream_capturing():
            return
        part = StepPart(self._gathered, kind, beside=kind == "evaluation" or not self._counts.under_way)
        self._clock.tick(part, time.monotonic())
        self._parts += 1
        if self._parts % _PARTS == 0:
            self._read_steps()

    def _is_trained(self, model: torch.nn.Module) -> bool:
        """Return whether an optimizer that has stepped moves parameters of this model."""
        groups = (group for optimizer in list(self._serials) for group in optimizer.param_groups)
        trained = {id(parameter) for group in groups for parameter in group["params"]}
        return any(id(parameter) in trained for parameter in model.parameters())

    def _fail(self, what: str, error: Exception) -> None:
        self._counts.leave()
        self._is_calm = False
        self._counts.why = f"{what}: {type(error).__name__}: {error}"

    def _end_step(self) -> None:
        step, self._gathered = self._gathered, TimedStep()
        if self._evaluations.has_signs:
            self._evaluations.cancel()
        step.optimizer = self._last_serial
        if self._loaders.used:
            step.units, step.batches = self._loaders.end_step(len(step.passes), self._lap_steps + 1)
        if self._waits.waited:
            step.waited, self._waits.waited = self._waits.waited, 0.0
        now = self._ended_at = time.monotonic()
        if not self._on_gpu:
            counted = self._counts.under_way
            step.communication, step.stands_for = self._waits.of_step(step.waited, now, counted=counted)
        self._clock.tick(step, now)
        unread = self._unread
        unread.append(step)
        self._steps += 1
        self._lap_steps += 1
        if self._is_calm and now < self._read_by and len(unread) < _BATCH:
            return
        self._is_lap_over = False
        step.counted = self._counts.under_way
        self._read_steps()
        if not self._counts.under_way:
            self._counts.consider(step.shape, self._lap_steps, has_batches=self._loaders.is_training)
        is_quiet = self._counts.is_calm and not (self._counts.under_way or self._counts.is_postponed)
        self._is_calm = self._lap_steps > _AT_ONCE and is_quiet

    def _read_steps(self) -> None:
        """Read the steps that wait for it."""
        unread, self._unread = self._unread, []
        self._read_by = self._ended_at + _BATCH_SECONDS
        on_gpu = self._waits.on_gpu(self._ended_at) if self._on_gpu else None
        data_parallel.watch()
        for step in unread:
            step.communication = on_gpu if self._on_gpu else step.communication
            step.shape = Shape(step.optimizer, step.passes, step.batches)
            self._counts.finish(step.shape)
            self._counts.want(step.shape, self._lap_steps)
        for optimizer, serial in self._alive(_makers(unread)):  # which may be gone by the end of the lap
            if (places := data_parallel.places_of(_parameters_of(optimizer))) is not None:
                self._places[serial] = places
        self._note(self._clock.ended())

    def _distrust(self, passes: int) -> None:
        """Take the steps of so many passes as of an unknown shape: they may have been others than they looked like."""
        for step in reversed(self._since_lap):
            if passes <= 0:
                break
            passes -= max(1, len(step.shape.passes))
            step.shape = UNKNOWN

    def _note(self, ended: Sequence[tuple[TimedStep, float]]) -> None:
        for step, seconds in ended:
            if isinstance(step, StepPart):
                step.note(seconds)
            elif step.counted:
                self._note_counting(step, seconds + step.parts - step.beside)
            elif seconds > 0:
                self._keep(step, seconds + step.parts)
                self._counts.trained += step.seconds
                self._look_again_if_changed(step.shape, training_of(step))
            else:
                self._clock_is_off = True

    def _keep(self, step: TimedStep, seconds: float) -> None:
        """Have a step among those that figures are of."""
        step.seconds, step.at = seconds, self._ended_at
        if not self._since_lap:
            self._window.clear()  # of the lap before: kept so far for those who look at what ran last
        self._window.append(step)
        self._keep_in_lap(step)

    def _keep_in_lap(self, step: TimedStep) -> None:
        self._since_lap.append(step)
        if len(self._since_lap) > LAP:
            oldest = self._since_lap.popleft()
            self._earlier.add(oldest, self._counts.known.get(oldest.shape))

    def _note_counting(self, step: TimedStep, seconds: float) -> None:
        """Note a step that was counted, which took longer for it: its own time is known by others of its shape.

        Args:
            step: The step.
            seconds: Of what was counted.
        """
        self._counted.note(step, seconds)
        if step.shape in self._usual:  # by a step of another shape, what counting has taken would not be known
            self._counts.spent += max(0.0, seconds - self._usual[step.shape])
        if self._counted.are_many:
            self._time_counted()

    def _time_counted(self) -> None:
        """Have the lap's figures be of counted steps, too."""
        for step in self._counted.timed_by(self._window if self._since_lap else ()):
            self._keep_in_lap(step)

    def _look_again_if_changed(self, shape: Shape, seconds: float) -> None:
        usual = self._usual.get(shape, seconds)
        self._usual[shape] = usual + (seconds - usual) / 8
        while len(self._usual) > _SHAPES:
            del self._usual[next(iter(self._usual))]
        self._reader.is_cheap = len(shape.passes) * self._reader.cost <= _READING * seconds
        may_read = self._reader.spent <= _READING_FREE + _READING * self._counts.trained
        if may_read and abs(seconds - usual) > _CHANGED * usual:
            self._reader.doubt()

    def _turn_to(self, optimizer: Optimizer) -> None:
        """Take the next steps as this optimizer's, which has a number that no other one ever has."""
        serial = self._serials.get(optimizer)
        if serial is None:
            self._serials[optimizer] = serial = self._steps + 1
            self._look_at_device(optimizer)
        self._last_optimizer, self._last_serial = weakref.ref(optimizer), serial

    def _look_at_device(self, optimizer: Optimizer) -> None:
        devices = (parameter.device for parameter in _parameters_of(optimizer))
        found = next(devices, self._device)
        if found != self._device:
            self._read_steps()
            self._device, self._on_gpu = found, found.type == "cuda"
            self._clock = DeviceClock(lambda: recorded_event(found)) if self._on_gpu else HostClock()


def recorded_event(device: torch.device) -> torch.cuda.Event:
    """Return an event in the stream of the device that trains, which need not be the current one."""
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return event


def _makers(steps: Sequence[TimedStep]) -> set[int]:
    """Return the numbers of the optimizers that have made these steps."""
    return {step.optimizer for step in steps}


def _parameters_of(optimizer: Optimizer) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def start() -> None:
    """Measure the steps of this process from now on, for `nbdist.metrics.node.active_meter`. Again: a cell begins."""
    if not measures():
        made = StepMeter()
        made.start()
        set_meter(made)
    if (meter := running()) is not None:
        meter.begin_cell()


def running() -> StepMeter | None:
    """Return the meter that `start` has made in this process; None if its steps are not measured."""
    meter = current()
    return meter if isinstance(meter, StepMeter) else None
