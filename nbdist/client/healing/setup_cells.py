"""What a newcomer among the ranks runs of a cell that was not marked for it: imports and definitions."""

from __future__ import annotations

import ast

_DEFINITIONS = (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


def definitions(code: str) -> str:
    """Return a cell's imports, functions and classes, each on its own line; "" if it has none.

    Args:
        code: Python, with IPython's own syntax (`!ls`, `%magic`), as the user typed it.
    """
    if code.lstrip().startswith("%%"):
        return ""
    from IPython.core.inputtransformer2 import TransformerManager  # not where only launches are

    try:
        code = TransformerManager().transform_cell(code)
        statements = ast.parse(code).body
    except SyntaxError:  # it failed everywhere
        return ""
    lines = code.splitlines()
    kept = [""] * len(lines)
    for statement in statements:
        if isinstance(statement, _DEFINITIONS):
            first, last = _extent(statement)
            alone = sum(first <= _extent(other)[1] and _extent(other)[0] <= last for other in statements) == 1
            source = lines[first - 1 : last] if alone else [ast.unparse(statement)]
            kept[first - 1] = f"{kept[first - 1]}\n{source[0]}".lstrip("\n")
            kept[first : first + len(source) - 1] = source[1:]
    return "\n".join(kept).rstrip() if any(kept) else ""


def _extent(statement: ast.stmt) -> tuple[int, int]:
    """Return the first and last line of a statement, with its decorators."""
    decorators = getattr(statement, "decorator_list", [])
    first = min([statement.lineno, *(decorator.lineno for decorator in decorators)])
    return first, statement.end_lineno or statement.lineno
