"""Accelerate on ranks without GPUs: its `PartialState()` sees all of them, as its `Accelerator()` does.

`Accelerator()` heeds ACCELERATE_USE_CPU, which launches set. `PartialState()` alone does not, and takes a rank without
an accelerator for the only process. Does nothing where that variable isn't set, or Accelerate isn't imported.
"""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any

from nbdist.checks import is_on
from nbdist.imports import after_import


def install() -> None:
    """Apply it once Accelerate is imported."""
    after_import("accelerate.state", _teach)


def _teach(module: ModuleType) -> None:
    state = getattr(module, "PartialState", None)
    if state is None:
        return
    make = state.__init__

    @functools.wraps(make)
    def init(self: Any, cpu: bool = False, **options: Any) -> None:
        make(self, cpu or is_on("ACCELERATE_USE_CPU"), **options)

    state.__init__ = init
