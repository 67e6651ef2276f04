"""Memory and TFLOPS over time, by matplotlib. Independent of where the points are from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from nbdist.base.text import flop_unit
from nbdist.errors import UsageError
from nbdist.panel.model import View

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_GIB = 1024**3


class Point(NamedTuple):
    """One look: seconds since 1970, bytes over ranks, FLOP/s of all ranks."""

    at: float
    least: float
    mean: float
    most: float
    flops: float | None

    @classmethod
    def of(cls, view: View) -> Point | None:
        """Return the point of a Sample; None if no rank has answered."""
        held = [row.held for row in view.rows if row.held is not None]
        return cls(view.at, min(held), sum(held) / len(held), max(held), view.flops) if held else None


def plot(points: Sequence[Point]) -> Figure:
    """Return a figure of memory (the mean over ranks, and the range), and of TFLOPS below it where there are any.

    Raises:
        UsageError: matplotlib is not installed, or there are no points.
    """
    if not points:
        raise UsageError("nothing has been seen yet that could be drawn: show the panel first, `%distributed panel`")
    try:
        from matplotlib import pyplot
    except ImportError:
        raise UsageError("matplotlib is not installed, which draws this: `%pip install matplotlib`") from None
    speed = any(point.flops is not None for point in points)
    figure, axes = pyplot.subplots(1 + speed, 1, sharex=True, squeeze=False, figsize=(8, 2.6 * (1 + speed)))
    _draw_memory(axes[0][0], points)
    if speed:
        _draw_speed(axes[1][0], points)
    axes[-1][0].set_xlabel("minutes")
    figure.align_ylabels()
    figure.tight_layout()
    pyplot.close(figure)  # else a notebook shows it twice: as a figure that is open, and as the cell's value
    return figure


def _draw_memory(axes: Axes, points: Sequence[Point]) -> None:
    minutes = _minutes(points)
    lines = [[getattr(point, name) / _GIB for point in points] for name in ("least", "mean", "most")]
    axes.fill_between(minutes, lines[0], lines[2], alpha=0.25, linewidth=0, label="min to max over ranks")
    axes.plot(minutes, lines[1], label="mean")
    axes.set_ylabel("memory, GiB per rank")
    axes.set_ylim(bottom=0)
    axes.legend(loc="lower right", frameon=False)


def _draw_speed(axes: Axes, points: Sequence[Point]) -> None:
    scale, unit = flop_unit(max(point.flops for point in points if point.flops is not None))
    # A gap where it was not known, for NaN is not drawn.
    axes.plot(_minutes(points), [float("nan") if point.flops is None else point.flops / scale for point in points])
    axes.set_ylabel(f"{unit}, all ranks")
    axes.set_ylim(bottom=0)


def _minutes(points: Sequence[Point]) -> list[float]:
    return [(point.at - points[0].at) / 60 for point in points]
