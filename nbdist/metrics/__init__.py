"""What training costs: memory, FLOPs, time. Independent of notebooks, sessions or the wire: it works anywhere."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nbdist.metrics import flops as flops
    from nbdist.metrics import memory as memory
    from nbdist.metrics import steps as steps

_FOR_USERS = ("flops", "memory", "steps")


def __dir__() -> list[str]:
    return sorted({*globals(), *_FOR_USERS})


def __getattr__(name: str) -> Any:
    if name not in _FOR_USERS:
        raise AttributeError(f"module 'nbdist.metrics' has no attribute {name!r}")
    return importlib.import_module(f"nbdist.metrics.{name}")
