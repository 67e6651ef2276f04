"""The meter of training steps that this process has, if any, for those who must not load torch to ask.

`nbdist.metrics.steps` puts it here. Imports nothing heavy.
"""

from __future__ import annotations

from typing import Protocol

from nbdist.metrics.node.sample import StepSample


class ActiveMeter(Protocol):
    """Measures steps; see `nbdist.metrics.steps.StepMeter`."""

    def stop(self) -> None:
        """Measure no longer."""

    def sample(self) -> StepSample:
        """Return the last steps."""

    def lap(self) -> StepSample | None:
        """Return the steps since the last lap, which ends now."""

    def release(self) -> None:
        """Let go of what only advice on the last steps would need."""


class NoMeter:
    """Stands for the meter where steps can't be measured.

    Args:
        why: The reason, in words.
    """

    def __init__(self, why: str) -> None:
        self._sample = StepSample(impossible=True, why=why)

    def stop(self) -> None:
        """Do nothing: nothing is measured."""

    def sample(self) -> StepSample:
        """Return nothing but why."""
        return self._sample

    def lap(self) -> StepSample:
        """Return nothing but why."""
        return self._sample

    def release(self) -> None:
        """Do nothing: nothing is kept."""


_meter: ActiveMeter | None = None


def measures() -> bool:
    """Return whether the steps of this process are measured."""
    return _meter is not None


def current() -> ActiveMeter | None:
    """Return the meter of this process; None if its steps are not measured."""
    return _meter


def set_meter(meter: ActiveMeter) -> None:
    """Set the meter that measures this process's steps from now on."""
    global _meter
    _meter = meter


def stop() -> None:
    """Measure no longer. In the thread that has called `nbdist.metrics.steps.start`."""
    global _meter
    if _meter is not None:
        _meter.stop()
    _meter = None


def current_sample() -> StepSample | None:
    """Return the last steps of this process, from any thread and at once; None if they are not measured."""
    meter = _meter
    return None if meter is None else meter.sample()


def end_lap() -> StepSample | None:
    """End the lap of a cell, or of other code with steps, in the thread that called `nbdist.metrics.steps.start`."""
    return None if _meter is None else _meter.lap()


def release() -> None:
    """Let go of what only advice on the last steps needs. In the thread that called `nbdist.metrics.steps.start`."""
    if _meter is not None:
        _meter.release()
