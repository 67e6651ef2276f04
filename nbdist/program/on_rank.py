"""What a rank does for `nbdist run` with a script: runs it as the main program, and returns what it needed."""

from __future__ import annotations

import resource
import runpy
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from nbdist.metrics.measuring import start_steps
from nbdist.metrics.node import active_meter


@dataclass(frozen=True)
class ProgramCosts:
    """What a rank needed.

    Attributes:
        seconds: For the whole script.
        host: Bytes of the process, at most.
        device: Bytes that torch had allocated on the GPU, at most; 0: it has none.
        steps: Optimizer steps.
        step: Seconds of one; 0: not known.
    """

    seconds: float
    host: int
    device: int
    steps: int
    step: float


def run_program(script: str, arguments: Sequence[str]) -> ProgramCosts:
    """Run a script as the main program of this rank.

    Args:
        script: Its path.
        arguments: What it finds in `sys.argv`.

    Returns:
        What it needed.

    Raises:
        SystemExit: It ended with an exit code other than 0.
    """
    sys.argv = [script, *arguments]
    sys.path.insert(0, str(Path(script).resolve().parent))
    start_steps()
    began = time.monotonic()
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as end:
        if end.code not in (None, 0):
            raise
    seconds = time.monotonic() - began
    lap = active_meter.end_lap()
    active_meter.stop()
    host = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    known = lap is not None and lap.seconds is not None
    return ProgramCosts(
        seconds, host, _device_peak(), lap.steps if lap else 0, lap.seconds or 0.0 if lap and known else 0.0
    )


def _device_peak() -> int:
    import torch

    is_used = torch.cuda.is_available() and torch.cuda.is_initialized()
    return int(torch.cuda.max_memory_allocated()) if is_used else 0
