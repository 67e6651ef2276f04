"""What is done once a module has been imported."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from nbdist.base.imports import after_import


@pytest.fixture
def name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A module that nobody has imported yet."""
    name = "imported_by_a_test"
    (tmp_path / f"{name}.py").write_text("value = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    finders = list(sys.meta_path)
    yield name
    sys.modules.pop(name, None)
    assert sys.meta_path == finders


def test_it_is_done_when_the_module_s_code_has_run(name: str) -> None:
    seen: list[object] = []
    after_import(name, lambda module: seen.append(module.value))
    assert seen == []
    importlib.import_module(name)
    assert seen == [1]


def test_it_is_done_at_once_where_the_module_is_there(name: str) -> None:
    module = importlib.import_module(name)
    seen: list[ModuleType] = []
    after_import(name, seen.append)
    assert seen == [module]


def test_several_may_wait_for_the_same_module(name: str) -> None:
    seen: list[str] = []
    for number in (1, 2, 3):
        after_import(name, lambda module, number=number: seen.append(f"{number}: {module.value}"))  # type: ignore[misc]
    importlib.import_module(name)
    assert sorted(seen) == ["1: 1", "2: 1", "3: 1"]


def test_who_asks_twice_for_the_same_gets_it_once(name: str) -> None:
    seen: list[ModuleType] = []
    action = seen.append
    after_import(name, action)
    after_import(name, action)
    importlib.import_module(name)
    assert len(seen) == 1
