"""How long an operation takes: by the host's clock on a CPU, by the device's own on a GPU. Independent of rates."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

_LEAST = 3  # runs


def once(run: Callable[[], object], device: torch.device, times: int = 1) -> float:
    """Return the seconds of one run.

    Args:
        run: What runs.
        device: Where.
        times: How often it runs for that: many times where one is too short for the device's clock.
    """
    if device.type != "cuda":
        began = time.perf_counter()
        for _ in range(times):
            run()
        return (time.perf_counter() - began) / times
    first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    stream = torch.cuda.current_stream(device)  # which need not be the current device's
    first.record(stream)
    for _ in range(times):
        run()
    last.record(stream)
    last.synchronize()
    return float(first.elapsed_time(last)) / 1000 / times


def median(run: Callable[[], object], device: torch.device, seconds: float) -> float:
    """Return the seconds of a run, the median of those that can be made in a given time; at least three are."""
    run()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    taken: list[float] = []
    deadline = time.perf_counter() + seconds
    while len(taken) < _LEAST or time.perf_counter() < deadline:
        taken.append(once(run, device))
    return statistics.median(taken)
