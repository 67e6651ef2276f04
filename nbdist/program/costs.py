"""What a rank has needed for a script or a notebook, and how that is said."""

from __future__ import annotations

import resource
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from nbdist.base.text import counted, duration, size


@dataclass(frozen=True)
class ProgramCosts:
    """What a rank needed.

    Attributes:
        seconds: For the whole script; 0: not known.
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


def costs_so_far() -> ProgramCosts:
    """Return what this rank has needed, with the steps of what `nbdist.prepare` has prepared."""
    training = sys.modules.get("nbdist.train.state")
    return ProgramCosts(0.0, peak_of_process(), peak_of_device(), training.current().steps if training else 0, 0.0)


def peak_of_process() -> int:
    """Return the bytes that this process has had in memory at most."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def peak_of_device() -> int:
    """Return the bytes that torch has had on the GPU at most; 0: it has used none."""
    torch: Any = sys.modules.get("torch")
    is_used = torch is not None and torch.cuda.is_available() and torch.cuda.is_initialized()
    return int(torch.cuda.max_memory_allocated()) if is_used else 0


def summary(spent: Sequence[ProgramCosts], seconds: float) -> str:
    """Return a line on what the ranks needed: time, memory, steps.

    Args:
        spent: By each of them.
        seconds: The time of all of it.
    """
    parts = [f"{counted(len(spent), 'rank')}, {duration(seconds)}"]
    for kind, peaks in (("CPU", [each.host for each in spent]), ("GPU", [each.device for each in spent])):
        if any(peaks):
            largest = max(peaks)
            parts.append(f"{kind} memory at most {size(largest)} (rank {peaks.index(largest)})")
    if any(each.steps for each in spent):
        slowest = max(spent, key=lambda each: (each.step, each.steps))
        each_step = f", {duration(slowest.step)} each" if slowest.step else ""
        parts.append(f"{counted(slowest.steps, 'step')}{each_step}")
    return "; ".join(parts)
