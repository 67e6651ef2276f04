"""All advice on the steps that this process has made last."""

from __future__ import annotations

from dataclasses import dataclass

from nbdist.metrics.advice.loader_advice import LoaderAdvice, advise_on_loaders
from nbdist.metrics.advice.shapes import ShapeAdvice, advise_on_shapes


@dataclass(frozen=True)
class Advice:
    """What was found.

    Attributes:
        shapes: On the sizes of the model and of its batch.
        loaders: On the DataLoaders that were waited for.
    """

    shapes: ShapeAdvice
    loaders: list[LoaderAdvice]


def advise(seconds: float = 20.0) -> Advice:
    """Measure what could make the last steps of this process faster. Nothing of the training changes.

    Args:
        seconds: How long, about.
    """
    loaders = advise_on_loaders(min(2.0, seconds / 4))
    return Advice(advise_on_shapes(seconds), loaders)
