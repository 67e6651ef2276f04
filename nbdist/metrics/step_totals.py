"""What training steps come to: sums over all their time, so that rates are what was done in it.

Independent of hooks, nor of when a step begins.
"""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import msgspec
import torch

from nbdist.metrics.compute.live import Known, Shape
from nbdist.metrics.events.evaluation import Part
from nbdist.metrics.node.sample import StepSample
from nbdist.metrics.rates import peaks

UNKNOWN = Shape(0, (), frozenset())


class TimedStep:
    """One step: first what is seen while it is under way, then what it was. Values of the class are where all begin."""

    passes: tuple[Hashable, ...] = ()
    batches: frozenset[Hashable] = frozenset()
    is_fed: bool = False  # whether a batch to train on has come
    waiting: float | None = None
    waited_beside: float = 0.0  # of `waiting`, what was over when a count of the step began
    waited: float = 0.0  # in collectives, as far as Python has heard of it
    units: int = 0
    optimizer: int = 0
    counted: bool = False  # which takes time of its own
    parts: float = 0.0  # seconds of its parts that were timed apart
    beside: float = 0.0  # of these, seconds that are no part of a count
    evaluation: float = 0.0  # of these, seconds of evaluations
    without_gradients: float = 0.0  # of these, seconds of what may be others
    communication: float | None = None
    stands_for: float = 1.0  # steps, in what is known of `communication`
    shape: Shape = UNKNOWN
    seconds: float = 0.0
    at: float = 0.0


class StepPart(TimedStep):
    """A part of a step that is timed apart.

    Args:
        step: The whole step.
        kind: What it was.
        beside: Whether it is not part of a count.
    """

    def __init__(self, step: TimedStep, kind: Part, *, beside: bool) -> None:
        self._step, self._kind, self._beside = step, kind, beside

    def note(self, seconds: float) -> None:
        """Note how long it took."""
        self._step.parts += seconds
        self._step.beside += seconds if self._beside else 0.0
        if self._kind == "evaluation":
            self._step.evaluation += seconds
        elif self._kind == "without gradients":
            self._step.without_gradients += seconds


@dataclass
class Totals:
    """Sums over steps.

    Attributes:
        steps: How many.
        seconds: What they took, stalls included.
        longest: Seconds of the one that took longest.
        units: Samples or tokens.
        waiting: Seconds spent waiting for data; None: without a DataLoader.
        communication: Seconds that only collectives took.
        communicating: Seconds of steps of which that is known, or which these stand for. Not their number: where two
            optimizers take turns, each second step is next to nothing.
        evaluation: Seconds of evaluations.
        without_gradients: Seconds of what may be others, or a part of each step.
        known: Seconds of steps whose FLOPs are known or likely, without evaluations.
        works: What is known of their FLOPs, by its identity, and of how many steps.
        likely: Of these, steps of an optimizer that was not counted, which look like those of another one.
    """

    steps: int = 0
    seconds: float = 0.0
    longest: float = 0.0
    units: int = 0
    waiting: float | None = None
    communication: float = 0.0
    communicating: float = 0.0
    evaluation: float = 0.0
    without_gradients: float = 0.0
    known: float = 0.0
    works: dict[int, tuple[Known, int]] = field(default_factory=dict)
    likely: int = 0

    def add(self, step: TimedStep, known: Known | None, likely: Known | None = None) -> None:
        """Add a step, what is known of its shape, and if nothing is, what it is likely to take."""
        self.evaluation += step.evaluation
        self.without_gradients += step.without_gradients
        self.steps += 1
        self.seconds += step.seconds
        self.longest = max(self.longest, step.seconds)
        self.units += step.units
        if step.waiting is not None:
            self.waiting = (self.waiting or 0.0) + step.waiting
        if step.communication is not None:
            self.communication += step.communication * step.stands_for
            self.communicating += training_of(step) * step.stands_for
        if known is None and likely is not None:
            self.likely += 1
            known = likely
        if known is not None:
            _, times = self.works.get(id(known), (known, 0))
            self.works[id(known)] = known, times + 1
            self.known += training_of(step)

    def with_steps(self, steps: Iterable[TimedStep], known: Mapping[Shape, Known]) -> Totals:
        """Return the sums with further steps."""
        found = replace(self, works=dict(self.works))
        likely: dict[tuple[Hashable, ...], Known] | None = None
        for step in steps:
            if step.shape not in known and likely is None:  # as for the steps of a new optimizer
                likely = {_looks(shape): each for shape, each in known.items()}
            found.add(step, known.get(step.shape), likely.get(_looks(step.shape)) if likely is not None else None)
        return found

    def sample(self, made: int, stalled: float = 0.0, *, evaluates: bool = False) -> StepSample:
        """Return what these steps took.

        Args:
            made: How many there have been, those included that are in no sum.
            stalled: Seconds since the last one ended. They count if they are more than any of these steps took.
            evaluates: Whether an evaluation is under way.
        """
        stalled = stalled if stalled > self.longest else 0.0
        whole = self.seconds + stalled
        known = sum(times for _, times in self.works.values())
        trained = self.seconds - self.evaluation
        communication = self.communication / self.communicating * trained if self.communicating else None
        found = StepSample(
            steps=made,
            timed=self.steps,
            seconds=whole / self.steps,
            uncounted=1 - (known - self.likely) / self.steps,
            waiting=None if self.waiting is None else min(1.0, self.waiting / whole),
            communication=None if communication is None else min(1.0, communication / whole),
            evaluation=(self.evaluation + (stalled if evaluates else 0.0)) / whole,
            units=self.units / self.steps or None,
        )
        # Steps of other shapes do as much in a second, as far as is known: a long one does more than a short one.
        scale = trained / self.steps / (self.known / known) if 0 < known < self.steps and self.known else 1.0
        return _with_flops(found, list(self.works.values()), scale) if known else found


def _looks(shape: Shape) -> tuple[Hashable, ...]:
    """Return what a step looks like, whoever makes it."""
    return shape.passes, shape.batches


def _with_flops(sample: StepSample, works: Sequence[tuple[Known, int]], scale: float) -> StepSample:
    """Return what each step of a sample takes, and what the device could do at most.

    Args:
        sample: Without that.
        works: What is known, and of how many steps.
        scale: What a step takes, by what one of these does.
    """
    steps = sum(times for _, times in works)
    by_dtype: Counter[str] = Counter()
    for known, times in works:
        for dtype, amount in known.work.items():
            by_dtype[dtype] += amount * times
    device = works[-1][0].device
    figures = {dtype: peaks.known(device, dtype) for dtype in by_dtype}
    peak = peaks.mixed(by_dtype, figures)
    missing = [dtype for dtype, _ in by_dtype.most_common() if figures[dtype] is None]
    read = [(known.count.tokens, times) for known, times in works if known.count.tokens]
    tokens = sum(count * times for count, times in read) / sum(times for _, times in read) if read else None
    return msgspec.structs.replace(
        sample,
        flops=scale * sum(known.count.model_flops * times for known, times in works) / steps,
        hardware_flops=scale * sum(known.count.hardware_flops * times for known, times in works) / steps,
        units=sample.units or tokens,
        unit="tokens" if tokens and not sample.units else "",
        batch=works[0][0].batch,
        peak=None if peak is None else peak.tflops * 1e12,
        peak_source="" if peak is None else peak.source,
        without_peak=missing,
        not_counted=sorted({name for known, _ in works for name in known.count.uncounted}),
        why=_no_peak(device, missing) if missing else "",
    )


def _no_peak(device: torch.device, dtypes: Sequence[str]) -> str:
    return f"no peak is known for {peaks.name_of(device)} at {', '.join(dtypes)}; `%distributed peak` measures it"


def seconds_of(step: TimedStep) -> float:
    """Return what a step took."""
    return step.seconds


def training_of(step: TimedStep) -> float:
    """Return what a step took without the evaluations before it."""
    return step.seconds - step.evaluation


def beyond_usual_without_gradients(totals: Totals, steps: Sequence[TimedStep]) -> float:
    """Return the share of all time that blocks without gradients took, beyond those of a step in the middle.

    Args:
        totals: Sums over all steps.
        steps: The last of them.
    """
    if not totals.without_gradients:
        return 0.0
    usual = statistics.median(step.without_gradients for step in steps)
    return max(0.0, totals.without_gradients - usual * totals.steps) / totals.seconds


def work_of(step: TimedStep) -> float:
    """Return what a step took without evaluations, and without waiting for data."""
    return max(0.0, training_of(step) - (step.waiting or 0.0))


def middle(steps: Sequence[TimedStep], figure: Callable[[TimedStep], float]) -> float:
    """Return a figure of a step in the middle: of each shape the median, weighed by how often it came."""
    by_shape: defaultdict[Shape, list[float]] = defaultdict(list)
    for step in steps:
        by_shape[step.shape].append(figure(step))
    return sum(len(each) * statistics.median(each) for each in by_shape.values()) / len(steps)
