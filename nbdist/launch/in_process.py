"""A launch of one process: the function runs in the notebook's own, as Accelerate does it. Starts nothing."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

from nbdist.launch.request import Request


def launch(request: Request) -> list[Any]:
    """Call the function here. What it raises comes through unchanged.

    Returns:
        Its value, as a list of one.
    """
    print(
        f"nbdist: {request.name} runs in the notebook's own process, as it is the only one "
        "(`start_method='warm'`: on a rank)",
        flush=True,
    )
    with _environment(ACCELERATE_MIXED_PRECISION=request.mixed_precision):
        return [request.function(*request.args)]


@contextlib.contextmanager
def _environment(**variables: str) -> Iterator[None]:
    """While the body runs, these variables are set; afterwards all are as before, whatever it has done to them."""
    before = dict(os.environ)
    os.environ.update(variables)
    try:
        yield
    finally:
        for name in os.environ.keys() - before.keys():
            del os.environ[name]
        os.environ.update(before)
