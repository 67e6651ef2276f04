"""Says where nbdist uses a private name of another package that docs/compatibility.md does not list, and the reverse.

    python scripts/lint_private_names.py [--list]

--list: print each name with the files that use it instead.
"""

from __future__ import annotations

import ast
import re
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "nbdist"
PAGE = ROOT / "docs" / "compatibility.md"
DOCUMENTED = {"os._exit", "sys._current_frames", "sys._getframe"}
MODULE = re.compile(r"torch(\.\w+)+")  # a text that names one, to be imported when it is needed
BY_NAME = ("getattr", "hasattr", "setattr", "delattr")  # functions that take an attribute's name
PUBLIC = {"_fields", "_replace", "_asdict"}  # of named tuples


def main() -> int:
    """Return the exit code: 1 if anything was found."""
    used = uses()
    if sys.argv[1:] == ["--list"]:
        for name, files in sorted(used.items()):
            print(name, *sorted(files))
        return 0
    listed = set(re.findall(r"`([\w.]*\._[\w.]+)`", PAGE.read_text().partition("| without it |")[2]))
    for name in sorted(used.keys() - listed):
        print(f"{min(used[name])} uses the private name {name}, which docs/compatibility.md does not list")
    for name in sorted(listed - used.keys()):
        print(f"docs/compatibility.md lists {name}, which nothing uses")
    return listed != used.keys()


def uses() -> dict[str, set[str]]:
    """The private names that nbdist uses, with the files: "torch._C._x", or "._x" where it is not known of what."""
    trees = {path.relative_to(ROOT).as_posix(): ast.parse(path.read_text()) for path in PACKAGE.rglob("*.py")}
    own = {name for tree in trees.values() for name in defined(tree)} | PUBLIC
    found: dict[str, set[str]] = defaultdict(set)
    for file, tree in trees.items():
        for name in private_names(tree):
            if not name.startswith(".") or name[1:] not in own:
                found[name].add(file)
    return found


def defined(tree: ast.Module) -> Iterator[str]:
    """Yield the names that a file gives: to functions, to fields, to attributes that it sets."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and is_self(node.value):
            yield node.attr


def private_names(tree: ast.Module) -> Iterator[str]:
    """Yield the private names of others that a file imports, reads or asks for."""
    modules: dict[str, str] = {}  # what the names in this file stand for
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                modules[alias.asname or alias.name.partition(".")[0]] = (
                    alias.name if alias.asname else alias.name.partition(".")[0]
                )
                yield from foreign(alias.name)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                modules[alias.asname or alias.name] = full
                yield from foreign(full)
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and MODULE.fullmatch(node.value):
            yield from foreign(node.value)
        for base, attribute in asked_for(node):
            first, _, rest = (dotted(base) or "").partition(".")
            if first in modules:
                yield from foreign(".".join(filter(None, (modules[first], rest, attribute))))
            elif is_private(attribute) and not is_self(base):
                yield f".{attribute}"


def asked_for(node: ast.AST) -> Iterator[tuple[ast.expr, str]]:
    """Yield the attribute that an expression reads, or asks for by `getattr` and the like, and what it is asked of."""
    if isinstance(node, ast.Attribute):
        yield node.value, node.attr
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in BY_NAME:
        for name in node.args[1:2]:
            if isinstance(name, ast.Constant) and isinstance(name.value, str):
                yield node.args[0], name.value


def dotted(node: ast.expr) -> str | None:
    """Return "a.b.c" for an expression that is just that."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (base := dotted(node.value)) is not None:
        return f"{base}.{node.attr}"
    return None


def is_self(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id in ("self", "cls")


def foreign(name: str) -> Iterator[str]:
    """Yield it up to its last private part, if it is private and another's."""
    parts = name.split(".")
    while parts and not is_private(parts[-1]):
        parts.pop()
    short = ".".join(parts)
    if len(parts) > 1 and parts[0] != "nbdist" and short not in DOCUMENTED:
        yield short


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith(("__", "_nbdist"))


if __name__ == "__main__":
    sys.exit(main())
