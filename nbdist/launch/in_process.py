"""A launch of one process: the function runs in the notebook's own, as in Accelerate. Starts nothing."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from typing import Any

from nbdist.client.start.session_plan import for_launch
from nbdist.launch.request import Request
from nbdist.train import active_training
from nbdist.worker.cell import launched


def launch(request: Request) -> list[Any]:
    """Call the function here. Its exceptions pass through unchanged.

    Returns:
        Its return value, in a list of one.
    """
    print(
        f"nbdist: {request.name} runs in the notebook's own process, because it is the only one "
        "(`start_method='warm'` runs it on a rank)",
        flush=True,
    )
    variables = {"ACCELERATE_MIXED_PRECISION": request.mixed_precision}
    variables |= for_launch(os.environ, request.mixed_precision)
    with _environment(variables), _training_apart():
        return [launched.call(request.function, *request.args)]


@contextlib.contextmanager
def _training_apart() -> Iterator[None]:
    """Let what the body prepares follow its own plan, not the plan of what the notebook prepared before."""
    before = active_training.training.replace(None) if active_training.training is not None else None
    try:
        yield
    finally:
        if active_training.training is not None and not active_training.training.is_begun():
            active_training.training.replace(before)


@contextlib.contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Set these variables while the body runs; afterwards all are as before, whatever it has done to them."""
    before = dict(os.environ)
    os.environ.update(variables)
    try:
        yield
    finally:
        for name in os.environ.keys() - before.keys():
            del os.environ[name]
        os.environ.update(before)
