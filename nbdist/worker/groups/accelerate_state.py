"""Accelerate on ranks without GPUs: its `PartialState()` sees all of them, as its `Accelerator()` does.

`Accelerator()` heeds ACCELERATE_USE_CPU, which launches set. `PartialState()` alone does not, and takes a rank without
an accelerator for the only process. Does nothing where that variable isn't set, or Accelerate isn't imported.
"""

from __future__ import annotations

import functools
import sys
from types import ModuleType

from nbdist.base.checks import is_on
from nbdist.base.imports import after_import


def renumber(rank: int, local_rank: int, world_size: int) -> None:
    """Have Accelerate know the rank's number among others, where it has read that already."""
    state = getattr(sys.modules.get("accelerate.state"), "PartialState", None)
    shared = getattr(state, "_shared_state", None)
    if shared:
        numbers = {"process_index": rank, "local_process_index": local_rank, "num_processes": world_size}
        shared.update({name: number for name, number in numbers.items() if name in shared})


def install() -> None:
    """Apply it once Accelerate is imported."""
    after_import("accelerate.state", _teach)


def _teach(module: ModuleType) -> None:
    state = getattr(module, "PartialState", None)
    if state is None:
        return
    make = state.__init__

    @functools.wraps(make)
    def init(self: object, cpu: bool = False, **options: object) -> None:
        make(self, cpu or is_on("ACCELERATE_USE_CPU"), **options)

    state.__init__ = init
