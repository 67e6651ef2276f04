"""Has `inspect` find the source of classes that cells define: it looks for their module's file, and cells have others.

Owns which cell a class is from. Independent of how cells run.
"""

from __future__ import annotations

import ast
import functools
import inspect
import linecache
import types
from collections.abc import Iterator, Mapping
from typing import Any

from nbdist import shells


@functools.cache
def find_classes() -> None:
    """Have `inspect.getfile`, and all that calls it, know classes of cells from now on, in this process and its forks.

    Only what raised before has another result, so that classes of modules and of running scripts are found as ever.
    """
    original = inspect.getfile

    @functools.wraps(original)
    def getfile(object: Any) -> str:
        try:
            return original(object)
        except (OSError, TypeError):
            file = file_of_class(object, shells.cell_files()) if isinstance(object, type) else None
            if file is None:
                raise
            return file

    inspect.getfile = getfile


def file_of_class(kind: type, cells: Mapping[str, int]) -> str | None:
    """Return the name that the code of a class has for a file.

    Its methods know; without any, it is the newest cell that defines a class of that name.

    Args:
        kind: The class.
        cells: Numbers of cells by the names that their code has for a file.

    Returns:
        None if no cell has defined it.
    """
    if kind.__module__ != "__main__":
        return None
    own = (code.co_filename for code in _codes_of(kind) if code.co_filename in cells)
    newest_first = sorted(cells, key=cells.__getitem__, reverse=True)
    return next(own, None) or next((file for file in newest_first if _defines(file, kind)), None)


def _codes_of(kind: type) -> Iterator[types.CodeType]:
    """Yield the code of methods that were written inside of a class, or of classes in it."""
    for value in vars(kind).values():
        function: Any = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
        name = getattr(function, "__qualname__", None)
        if not (isinstance(name, str) and name.startswith(f"{kind.__qualname__}.")):
            continue
        if isinstance(function, type):
            yield from _codes_of(function)
        elif isinstance(code := getattr(inspect.unwrap(function), "__code__", None), types.CodeType):
            yield code


def _defines(file: str, kind: type) -> bool:
    source = "".join(linecache.getlines(file))
    if f"class {kind.__name__}" not in source:
        return False
    line = vars(kind).get("__firstlineno__")  # from Python 3.13 on
    found = _classes_in(ast.parse(source))
    return any(name == kind.__qualname__ and line in (None, first) for name, first in found)


def _classes_in(tree: ast.AST, prefix: str = "") -> Iterator[tuple[str, int]]:
    """Yield the qualified names of all classes that are defined, and their first lines."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.ClassDef):
            yield f"{prefix}{node.name}", min([node.lineno, *(each.lineno for each in node.decorator_list)])
            yield from _classes_in(node, f"{prefix}{node.name}.")
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield from _classes_in(node, f"{prefix}{node.name}.<locals>.")
        else:
            yield from _classes_in(node, prefix)
