"""What is done once a module has been imported, now or later. Imports nothing itself."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


def after_import(name: str, action: Callable[[ModuleType], None]) -> None:
    """Call a function with a module: at once if it is there, else right after its code has run.

    Args:
        name: The module's full name.
        action: Called with it; once, however often the same is asked for before the import.
    """
    module = sys.modules.get(name)
    finder = _Finder(name, action)
    if module is not None:
        action(module)
    elif finder not in sys.meta_path:
        sys.meta_path.insert(0, finder)


class _Finder:
    """Finds nothing itself: it follows the loader that another finder gives, then takes itself away."""

    def __init__(self, name: str, action: Callable[[ModuleType], None]) -> None:
        self._name = name
        self._action = action
        self._asking = False

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Finder) and (self._name, self._action) == (other._name, other._action)

    def __hash__(self) -> int:
        return hash((self._name, self._action))

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != self._name or self._asking:  # finders like this one ask each other
            return None
        self._asking = True
        try:
            spec = self._ask_others(name, path, target)
        finally:
            self._asking = False
        if spec is not None and hasattr(spec.loader, "exec_module"):
            self._follow(spec.loader)
        return spec

    def _ask_others(self, name: str, path: Sequence[str] | None, target: ModuleType | None) -> ModuleSpec | None:
        others = [finder.find_spec for finder in sys.meta_path if finder is not self and hasattr(finder, "find_spec")]
        return next((spec for find in others if (spec := find(name, path, target)) is not None), None)

    def _follow(self, loader: Any) -> None:
        execute = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            with contextlib.suppress(AttributeError):  # gone already, where other hooks led here twice
                del loader.exec_module
            if self in sys.meta_path:
                sys.meta_path.remove(self)
                self._action(module)

        with contextlib.suppress(AttributeError):  # a loader with slots can't be followed
            loader.exec_module = exec_module
