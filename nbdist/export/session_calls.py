"""What a notebook asks of its ranks in Python, `session.run(...)` and its like, as code that all ranks run together."""

from __future__ import annotations

import ast
import textwrap

from nbdist.export.source.code_parts import CodePart
from nbdist.export.source.plain_python import NotExportable
from nbdist.export.source.source_edits import Edit, edited, segment

_MAKERS = ("nbdist.get_session", "get_session", "nbdist.Session", "Session")


def made_session(part: CodePart) -> ast.Call | None:
    """Return the call by which a part gets a session, if that is all it does: `session = nbdist.Session(4)`."""
    statement = part.statements[0] if len(part.statements) == 1 else None
    if isinstance(statement, ast.Assign | ast.Expr) and isinstance(statement.value, ast.Call):
        return statement.value if ast.unparse(statement.value.func) in _MAKERS else None
    return None


def uses_session(part: CodePart, sessions: set[str]) -> bool:
    """Return whether a part does something with a session."""
    return bool(part.used & sessions)


def without_session(part: CodePart, sessions: set[str]) -> tuple[str, set[str]]:
    """Return a part as code that all ranks run together, and the helpers that it needs.

    Raises:
        NotExportable: There is no counterpart.
    """
    edits: list[Edit] = []
    helpers: set[str] = set()
    handled: set[ast.AST] = set()
    statements = {node.value: node for node in ast.walk(part.tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(part.tree):
        if not isinstance(node, ast.Call):
            continue
        if isinstance(node.func, ast.Name) and node.func.id == "print":
            edits.append(Edit(node.func, "nbdist.print"))
            helpers.add("nbdist")
        if not (isinstance(node.func, ast.Attribute) and isinstance(node.func.value, ast.Name)):
            continue
        if node.func.value.id in sessions:
            handled.add(node.func.value)
            indent = " " * node.col_offset
            text, wanted = _replacement(part.text, node, node in statements, indent)
            edits.append(Edit(node, text))
            helpers |= wanted
    names = (node for node in ast.walk(part.tree) if isinstance(node, ast.Name) and node.id in sessions)
    if any(node not in handled for node in names):
        raise NotExportable("it passes the session on")
    return edited(part.text, edits), helpers


def _replacement(source: str, call: ast.Call, is_statement: bool, indent: str) -> tuple[str, set[str]]:
    assert isinstance(call.func, ast.Attribute)
    method, arguments = call.func.attr, call.args
    if method == "set_plan" and len(arguments) == 1:
        return f"nbdist.set_plan({segment(source, arguments[0])})", {"nbdist"}
    if method == "run" and is_statement and len(arguments) == 1 and not call.keywords:
        return textwrap.indent(_literal(arguments[0]).strip("\n"), indent).lstrip(), set()
    if method == "pull" and 1 <= len(arguments) <= 2 and not call.keywords:
        which = f"[{segment(source, arguments[1])}]" if len(arguments) == 2 else ""
        return f"everyone({_literal(arguments[0])}){which}", {"everyone"}
    if method == "call" and arguments and not {each.arg for each in call.keywords} & {"ranks", "timeout"}:
        function, *rest = [segment(source, each) for each in arguments]
        keywords = [f"{each.arg}={segment(source, each.value)}" for each in call.keywords]
        return f"everyone({function}({', '.join([*rest, *keywords])}))", {"everyone"}
    if method == "push" and is_statement and len(arguments) == 1 and isinstance(arguments[0], ast.Dict):
        pairs = zip(arguments[0].keys, arguments[0].values, strict=True)
        lines = [f"{_literal(key)} = {segment(source, value)}" for key, value in pairs]
        return f"\n{indent}".join(lines), set()
    if method in ("close", "status") and is_statement:
        return "pass", set()
    raise NotExportable(f"`.{method}` of a session has no counterpart in a script here")


def _literal(node: ast.expr | None) -> str:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    raise NotExportable("what the ranks are to run is known only when the notebook runs")
