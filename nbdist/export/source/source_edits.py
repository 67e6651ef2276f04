"""Changes to source text at the places of its syntax tree, so that everything else stays as the user wrote it."""

from __future__ import annotations

import ast
import io
import itertools
import tokenize
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

TOP_LEVEL_AWAIT = ast.PyCF_ONLY_AST | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT


def parse(source: str) -> ast.Module:
    """Return the tree of a cell's source, which may await at the top level.

    Raises:
        SyntaxError: It is not Python.
    """
    tree = compile(source, "<cell>", "exec", TOP_LEVEL_AWAIT, dont_inherit=True)
    assert isinstance(tree, ast.Module)
    return tree


@dataclass(frozen=True)
class Edit:
    """Text for the place of a node.

    Attributes:
        node: The node.
        text: What to write there.
        at_start: Whether to write it before the node, in place of nothing.
    """

    node: ast.expr | ast.stmt
    text: str
    at_start: bool = False


def edited(source: str, edits: Iterable[Edit]) -> str:
    """Return a source with other text at the places of some nodes, which don't overlap."""
    data = source.encode()
    starts = [0, *itertools.accumulate(len(line) for line in data.splitlines(keepends=True))]
    places = []
    for edit in edits:
        node = edit.node
        first = starts[node.lineno - 1] + node.col_offset
        last = starts[(node.end_lineno or node.lineno) - 1] + (node.end_col_offset or 0)
        places.append((first, first if edit.at_start else last, edit.text))
    for first, last, text in sorted(places, reverse=True):
        data = data[:first] + text.encode() + data[last:]
    return data.decode()


def segment(source: str, node: ast.expr | ast.stmt) -> str:
    """Return the text of a node."""
    return ast.get_source_segment(source, node) or ast.unparse(node)


def indented(source: str) -> str:
    """Return a source one level deeper. Lines inside of strings stay as they are."""
    inside = _lines_in_strings(source)
    lines = source.splitlines()
    return "\n".join(line if n in inside or not line.strip() else f"    {line}" for n, line in enumerate(lines, 1))


def _lines_in_strings(source: str) -> Collection[int]:
    inside: set[int] = set()
    begun: list[int] = []  # f-strings, in Python 3.12 and later
    for token in tokenize.generate_tokens(io.StringIO(source + "\n").readline):
        name = tokenize.tok_name[token.type]
        if name == "STRING":
            inside.update(range(token.start[0] + 1, token.end[0] + 1))
        elif name in ("FSTRING_START", "TSTRING_START"):
            begun.append(token.start[0])
        elif name in ("FSTRING_END", "TSTRING_END"):
            inside.update(range(begun.pop() + 1, token.end[0] + 1))
    return inside


def renamed(source: str, names: Mapping[str, str]) -> str:
    """Return a source in which variables, functions and classes have other names."""
    if not names:
        return source
    edits = []
    for node in ast.walk(parse(source)):
        if isinstance(node, ast.Name) and node.id in names:
            edits.append(Edit(node, names[node.id]))
    lines = edited(source, edits).splitlines()
    for node in parse(source).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and node.name in names:
            line = lines[node.lineno - 1]
            lines[node.lineno - 1] = line.replace(f" {node.name}", f" {names[node.name]}", 1)
    return "\n".join(lines)
