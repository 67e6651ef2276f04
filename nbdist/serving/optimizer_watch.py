"""Calls something as soon as a script has imported torch's optimizers, before it can have made a step.

Thus ranks count their steps from the same one. Imports nothing itself.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from types import ModuleType

_MODULE = "torch.optim.optimizer"
_REGISTER = "register_optimizer_step_post_hook"

HookTaker = Callable[[Callable[..., None]], object]  # torch's function that takes a hook


def once_optimizers_are_there(call: Callable[[HookTaker], None]) -> None:
    """Call something with torch's function that takes a hook for all steps: now, or while the script imports torch."""
    if (register := getattr(sys.modules.get(_MODULE), _REGISTER, None)) is not None:
        call(register)
    else:
        sys.meta_path.insert(0, _OptimizerWatch(call))


class _OptimizerWatch:
    """Is asked for each module that is imported, as what finds modules is, and finds none.

    torch imports some modules between its first optimizer and the end of the import.
    """

    def __init__(self, call: Callable[[HookTaker], None]) -> None:
        self._call = call

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> None:
        register = getattr(sys.modules.get(_MODULE), _REGISTER, None)
        if register is not None and self in sys.meta_path:
            # A list of its own: whoever imports now walks through this one.
            sys.meta_path = [finder for finder in sys.meta_path if finder is not self]
            self._call(register)
