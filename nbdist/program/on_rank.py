"""What a rank does for `nbdist run` with a script: runs it as the main program, and returns what it needed."""

from __future__ import annotations

import runpy
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from nbdist.metrics.measuring import start_steps
from nbdist.metrics.node import active_meter
from nbdist.program.costs import ProgramCosts, peak_of_device, peak_of_process


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
    steps, each = (lap.steps, lap.seconds or 0.0) if lap is not None else (0, 0.0)
    return ProgramCosts(seconds, peak_of_process(), peak_of_device(), steps, each)
