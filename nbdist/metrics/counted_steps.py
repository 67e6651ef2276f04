"""Steps in which FLOPs were counted, which took longer for it: their own time is known by others of their shapes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator

from nbdist.metrics.compute.live import Shape
from nbdist.metrics.step_totals import TimedStep, middle, work_of

_UNTIMED = 16  # whose time is found out at the end of the lap; of more, before
_FASTER = 4  # the usual time is that of the slowest of the fastest quarter


class CountedSteps:
    """The counted steps of a lap."""

    def __init__(self) -> None:
        self._untimed: list[TimedStep] = []
        self._seconds: list[float] = []

    def note(self, step: TimedStep, seconds: float) -> None:
        """Note a step, and the seconds of what was counted."""
        self._seconds.append(seconds)
        self._untimed.append(step)

    @property
    def are_many(self) -> bool:
        """Whether so many are without a time that it is to be found out now."""
        return len(self._untimed) > _UNTIMED

    def timed_by(self, others: Iterable[TimedStep]) -> Iterator[TimedStep]:
        """Give them the time that their work usually takes, and yield them.

        Stalls are in the time of some steps, so it is that of the faster ones; without any of its shape, a step is left
        out, unless an evaluation or a pause was before it.

        Args:
            others: Steps that were not counted.
        """
        works: defaultdict[Shape, list[float]] = defaultdict(list)
        others = list(others)
        for step in others:
            works[step.shape].append(work_of(step))
        typical = middle(others, work_of) if works else 0.0
        untimed, self._untimed = self._untimed, []
        for step in untimed:
            known = sorted(works.get(step.shape, ()))
            usual = known[len(known) // _FASTER] if known else typical
            before = step.beside - step.evaluation - step.waited_beside
            pause = before if before > usual else 0.0
            if known or (works and (step.evaluation or pause)):
                step.seconds = step.evaluation + (step.waiting or 0.0) + usual + pause
                yield step

    def took(self, usual: float) -> float:
        """Return the seconds that counting has added to them.

        Args:
            usual: Seconds of a step that was not counted; 0: not known.
        """
        return sum(max(0.0, seconds - usual) for seconds in self._seconds) if usual else 0.0

    def end_lap(self) -> None:
        """Begin with none."""
        self._untimed.clear()
        self._seconds.clear()
