"""Where this process is, as plain values: `nbdist.device`, `nbdist.process_index`, `nbdist.num_processes`.

These are properties of Accelerate's object. Each is looked up when it is read. Independent of models.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from nbdist.train import state as training
from nbdist.train.collective.process_group import ensure_group
from nbdist.train.collective.turns import local_rank

if TYPE_CHECKING:
    import torch

    device: torch.device  # of this rank
    process_index: int  # its rank
    local_process_index: int  # its rank on its node
    num_processes: int  # the number of ranks
    split_batches: bool  # whether a loader's batch size is that of all ranks together

_VALUES: dict[str, Callable[[], Any]] = {
    "device": lambda: training.current().device,
    "process_index": training.rank,
    "local_process_index": local_rank,
    "num_processes": training.world_size,
    "split_batches": lambda: False,  # it is that of each rank, always
}


def __getattr__(name: str) -> Any:
    if name not in _VALUES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    ensure_group()
    return _VALUES[name]()
