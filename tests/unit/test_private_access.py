"""Tests and benchmarks know nbdist by what it offers: few places reach into what is private to it."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MOST = 10
BY_NAME = {"setattr", "getattr", "delattr", "object"}  # functions that take an attribute as text
PRIVATE = re.compile(r"_[A-Za-z]\w*")
# Names that Python, torch and others have too, where a test means theirs, or those of its own stand-ins.
OF_OTHERS = {
    "_backend", "_current_frames", "_getframe", "_grouped_mm", "_is_compiled", "_lock", "_loop", "_render_traceback_",
    "_replace", "_repr_html_", "_reset", "_snapshot", "_timeout", "_workers", "_world",
}  # fmt: skip


@functools.cache
def private_names() -> set[str]:
    """What nbdist defines with one underscore, anywhere."""
    found: set[str] = set()
    for path in (ROOT / "nbdist").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                found.add(node.name)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                found.add(node.attr)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                found.add(node.id)
    return {name for name in found if PRIVATE.fullmatch(name)} - OF_OTHERS


def uses(source: str) -> Iterator[tuple[int, str]]:
    """Where code, or code in its strings, names what is private to another object, and as what."""
    for node in ast.walk(ast.parse(source)):
        yield from ((node.lineno, name) for name in used(node) if name in private_names())  # type: ignore[attr-defined]


def used(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Attribute):
        own = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
        return [] if own else [node.attr]
    if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("nbdist"):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.Call) and getattr(node.func, "attr", getattr(node.func, "id", "")) in BY_NAME:
        return [each.value for each in node.args[1:2] if isinstance(each, ast.Constant) and isinstance(each.value, str)]
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return re.findall(r"(?<!self)\.(_[A-Za-z]\w*)", node.value)
    return []


def test_few_places_reach_into_what_is_private_to_nbdist() -> None:
    paths = [path for folder in ("benchmarks", "testbed", "tests") for path in sorted((ROOT / folder).rglob("*.py"))]
    listed = {Path(__file__), ROOT / "tests" / "support" / "private_names.py"}  # they name names, and reach nowhere
    found = [
        f"{path.relative_to(ROOT)}:{line}: {name}"
        for path in paths
        if path not in listed
        for line, name in uses(path.read_text())
    ]
    assert len(found) <= MOST, "\n".join(found)


@pytest.mark.parametrize(
    "source",
    [
        "session._rank_set",
        "cell = 'session._rank_set.close()'",
        "monkeypatch.setattr(session, '_rank_set', None)",
        "monkeypatch.setattr('nbdist.client.session.session._sessions', [])",
        "from nbdist.client.session.session import _sessions",
    ],
)
def test_a_reach_is_seen_however_it_is_written(source: str) -> None:
    assert len(list(uses(source))) == 1


@pytest.mark.parametrize("source", ["self._rank_set", "session.ranks", "sys._getframe()"])
def test_what_is_ones_own_or_of_others_is_no_reach(source: str) -> None:
    assert list(uses(source)) == []
