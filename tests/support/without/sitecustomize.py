"""Takes private names of other packages away from nbdist alone, as if these versions did not have them.

For each Python process whose PYTHONPATH begins with this folder. The environment's NBDIST_TESTS_WITHOUT has the names,
each "a.module", "a.module:attribute" or "a.module:Class.attribute". All others, these packages too, still see them.
"""

from __future__ import annotations

import builtins
import importlib
import importlib.abc
import importlib.util
import inspect
import os
import sys
from collections.abc import Mapping, Sequence
from importlib.machinery import ModuleSpec
from types import FrameType, ModuleType
from typing import Any

OURS = "nbdist"


class Missing:
    """An attribute of a class, which nbdist does not find."""

    def __init__(self, name: str, original: Any) -> None:
        self._name, self._original = name, original

    def __get__(self, of: Any, kind: Any) -> Any:
        if _asks(sys._getframe(1)):
            raise AttributeError(f"{kind.__name__!r} object has no attribute {self._name!r}")
        if of is not None and self._name in getattr(of, "__dict__", {}):
            return of.__dict__[self._name]
        if self._original is None:
            raise AttributeError(self._name)
        get = getattr(type(self._original), "__get__", None)
        return self._original if get is None else get(self._original, of, kind)

    def __set__(self, of: Any, value: Any) -> None:
        of.__dict__[self._name] = value


class Finder(importlib.abc.MetaPathFinder):
    """Takes the attribute away as soon as its module is there."""

    def __init__(self, module: str, attribute: str) -> None:
        self._module, self._attribute = module, attribute

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != self._module:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        assert spec is not None and spec.loader is not None
        run = spec.loader.exec_module

        def run_and_take(module: ModuleType) -> None:
            run(module)
            _take(module, self._attribute)

        spec.loader.exec_module = run_and_take  # type: ignore[method-assign]
        return spec


def _take(module: ModuleType, attribute: str) -> None:
    owner, _, name = attribute.rpartition(".")
    if owner:
        kind = getattr(module, owner)
        setattr(kind, name, Missing(name, inspect.getattr_static(kind, name, None)))
        return

    class Without(type(module)):  # type: ignore[misc]
        def __getattribute__(self, asked: str) -> Any:
            if asked == name and _asks(sys._getframe(1)):
                raise AttributeError(f"module {module.__name__!r} has no attribute {name!r}")
            return super().__getattribute__(asked)

    module.__class__ = Without


def _take_module(name: str) -> None:
    parent, _, last = name.rpartition(".")
    sys.meta_path.insert(0, Finder(parent, last))  # `parent.last` and `from parent import last` find it there
    imported, by_name = builtins.__import__, importlib.import_module

    def is_it(asked: str) -> bool:
        return f"{asked}.".startswith(f"{name}.")

    def import_(
        asked: str,
        globals: Mapping[str, object] | None = None,
        locals: Mapping[str, object] | None = None,
        fromlist: Sequence[str] | None = (),
        level: int = 0,
    ) -> ModuleType:
        wanted = (asked, *(f"{asked}.{each}" for each in fromlist or ()))
        if level == 0 and _is_ours(str((globals or {}).get("__name__"))) and any(map(is_it, wanted)):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return imported(asked, globals, locals, fromlist or (), level)

    def import_module(asked: str, package: str | None = None) -> ModuleType:
        if is_it(asked) and _asks(sys._getframe(1)):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return by_name(asked, package)

    builtins.__import__ = import_  # type: ignore[assignment]
    importlib.import_module = import_module  # type: ignore[assignment]


def _asks(frame: FrameType) -> bool:
    return _is_ours(str(frame.f_globals.get("__name__")))


def _is_ours(name: str) -> bool:
    return name.partition(".")[0] == OURS


for each in os.environ.get("NBDIST_TESTS_WITHOUT", "").split():
    module, _, attribute = each.partition(":")
    if attribute:
        sys.meta_path.insert(0, Finder(module, attribute))
    else:
        _take_module(module)
