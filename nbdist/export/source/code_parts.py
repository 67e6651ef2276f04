"""A cell's code in parts, each one or more statements with the comments above: what it sets, uses, asks of IPython.

Independent of where the parts will run.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from nbdist.export.source.source_edits import parse

_SHELL = "get_ipython"  # what IPython writes for magics


@dataclass(frozen=True)
class Directive:
    """A magic or a shell line.

    Attributes:
        kind: "line": a line magic; "cell": a cell magic; "shell": `!command`.
        name: Of the magic.
        line: What follows it on the line.
        body: The rest of a cell magic's cell.
    """

    kind: str
    name: str
    line: str
    body: str = ""

    def __str__(self) -> str:
        mark = {"line": f"%{self.name} ", "cell": f"%%{self.name} ", "shell": "!"}[self.kind]
        return f"{mark}{self.line}".strip()


@dataclass(frozen=True)
class CodePart:
    """Statements of a cell that are treated alike.

    Attributes:
        text: Their source, with the comments above.
        is_last: Whether the cell ends with it, so that the notebook shows its value.
    """

    text: str
    is_last: bool

    @cached_property
    def tree(self) -> ast.Module:
        """The syntax tree of its text."""
        return parse(self.text)

    @property
    def statements(self) -> list[ast.stmt]:
        """The statements."""
        return self.tree.body

    @cached_property
    def bound(self) -> frozenset[str]:
        """The names that it sets."""
        return frozenset(name for statement in self.statements for name in _bound(statement))

    @cached_property
    def used(self) -> frozenset[str]:
        """The names that it reads, those inside of its functions included."""
        nodes = (node for node in ast.walk(self.tree) if isinstance(node, ast.Name))
        return frozenset(node.id for node in nodes if not isinstance(node.ctx, ast.Store))

    @cached_property
    def directive(self) -> Directive | None:
        """The magic or shell line that it is; None: it is Python."""
        statement = self.statements[0] if len(self.statements) == 1 else None
        return directive_of(statement.value) if isinstance(statement, ast.Expr) else None

    @property
    def shown(self) -> str:
        """Its text as the user has typed it, nearly."""
        return self.text if self.directive is None else str(self.directive)

    @property
    def value(self) -> ast.expr | None:
        """What the notebook shows below the cell; None: nothing."""
        last = self.statements[-1] if self.statements and self.is_last else None
        if not isinstance(last, ast.Expr) or self.text.rstrip().endswith(";"):
            return None
        is_print = isinstance(last.value, ast.Call) and ast.unparse(last.value.func) in ("print", "nbdist.print")
        return None if is_print or isinstance(last.value, ast.Await) else last.value

    @property
    def is_import(self) -> bool:
        """Whether it only imports."""
        return all(isinstance(each, ast.Import | ast.ImportFrom) for each in self.statements)

    @property
    def is_definition(self) -> bool:
        """Whether it only defines functions and classes."""
        kinds = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
        return all(isinstance(each, kinds) for each in self.statements)


def parts_of(source: str) -> list[CodePart]:
    """Return the parts of a source, in order; statements that share a line are one part.

    Raises:
        SyntaxError: It is not Python.
    """
    lines = source.splitlines()
    ends: list[int] = []
    begun = 0
    for statement in parse(source).body:
        end = statement.end_lineno or statement.lineno
        if ends and statement.lineno <= begun:
            ends[-1] = end
        else:
            ends.append(end)
        begun = end
    if ends:
        ends[-1] = len(lines)  # with the comments below
    starts = [0, *ends[:-1]]
    texts = ["\n".join(lines[start:end]) for start, end in zip(starts, ends, strict=True)]
    return [CodePart(text.rstrip("\n"), number == len(texts)) for number, text in enumerate(texts, 1)]


def directive_of(node: ast.expr) -> Directive | None:
    """Return the magic or shell line that IPython has written as this call; None: it is something else."""
    if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and _is_shell(node.func.value)):
        return None
    words = [argument.value for argument in node.args if isinstance(argument, ast.Constant)]
    if len(words) != len(node.args) or not all(isinstance(word, str) for word in words):
        return None
    texts = [str(word) for word in words]
    called = node.func.attr
    if called in ("system", "getoutput") and len(texts) == 1:
        return Directive("shell", called, texts[0])
    if called == "run_line_magic" and len(texts) == 2:
        return Directive("line", *texts)
    if called == "run_cell_magic" and len(texts) == 3:
        return Directive("cell", *texts)
    return None


def _is_shell(node: ast.expr) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == _SHELL


def shell_calls(tree: ast.AST) -> Iterator[tuple[ast.Call, Directive | None]]:
    """Return each call to IPython's shell in a tree, with the magic that it is."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and _is_shell(node.func.value):
            yield node, directive_of(node)


def _bound(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        yield node.name
        return
    if isinstance(node, ast.Lambda | ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp):
        return
    if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
        yield node.id
    if isinstance(node, ast.ExceptHandler) and node.name:
        yield node.name
    if isinstance(node, ast.Import | ast.ImportFrom):
        yield from ((alias.asname or alias.name).partition(".")[0] for alias in node.names)
    for child in ast.iter_child_nodes(node):
        yield from _bound(child)
