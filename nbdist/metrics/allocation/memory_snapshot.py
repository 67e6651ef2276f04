"""Torch's memory snapshot of one process: which tensor holds which part of the device's memory, and who allocated it.

Owns the bounds: how many events are kept, and how large a file may become. Independent of sessions.
"""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

from nbdist.errors import UsageError

NO_GPU = (
    "there is no GPU here, and torch keeps no record of CPU memory: "
    "`%distributed memory on` shows what cells cost, `%%distributed --profile` what operations do"
)
EVENTS = 100_000  # allocations and frees that are remembered; about 1 KB each


def record(events: int = EVENTS) -> None:
    """Record allocations and frees from now on, with the lines that made them.

    Args:
        events: How many; 0 ends it.

    Raises:
        UsageError: There is no device memory here, or this torch can't.
    """
    function = _part("_record_memory_history")
    if events:
        function(max_entries=events, stacks="python")  # those of C++ take seconds to name
    else:
        function(enabled=None)


def write(path: Path) -> int:
    """Write the snapshot of this process, for https://pytorch.org/memory_viz.

    Args:
        path: The file; it is whole, or not there.

    Returns:
        Its size, bytes.

    Raises:
        UsageError: There is no device memory here, or this torch can't.
    """
    snapshot = _part("_snapshot")()
    unfinished = path.with_name(path.name + ".partial")
    try:
        with unfinished.open("wb") as file:
            pickle.dump(snapshot, file)
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)
    return path.stat().st_size


def _part(name: str) -> Any:
    """Return a function of torch.cuda.memory; young and private, so it is looked for when it is used."""
    import torch

    if not torch.cuda.is_available():
        raise UsageError(NO_GPU)
    function = getattr(torch.cuda.memory, name, None)
    if function is None:
        raise UsageError(f"PyTorch {torch.__version__} has no torch.cuda.memory.{name}: a newer one writes snapshots")
    return function
