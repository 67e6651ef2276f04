"""Accelerate on ranks without GPUs: its `PartialState()` sees all of them, as its `Accelerator()` does.

`Accelerator()` heeds ACCELERATE_USE_CPU, which launches set. `PartialState()` alone does not, and takes a rank without
an accelerator for the only process. Does nothing where that variable isn't set, or Accelerate isn't imported.
"""

from __future__ import annotations

import functools
import os
from types import ModuleType
from typing import Any

from nbdist.imports import after_import

_TRUE = ("1", "true", "yes", "on", "y", "t")  # to Accelerate


def install() -> None:
    """From now on, once Accelerate is imported."""
    after_import("accelerate.state", _teach)


def _teach(module: ModuleType) -> None:
    state = getattr(module, "PartialState", None)
    if state is None:
        return
    make = state.__init__

    @functools.wraps(make)
    def init(self: Any, cpu: bool = False, **options: Any) -> None:
        make(self, cpu or os.environ.get("ACCELERATE_USE_CPU", "").lower() in _TRUE, **options)

    state.__init__ = init
