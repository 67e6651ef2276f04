"""Plain Python for what only IPython understands: its magics, shell lines, and `await` outside of a function.

Independent of where the code will run.
"""

from __future__ import annotations

import ast
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, field

from nbdist.export.source.code_parts import CodePart, Directive, shell_calls
from nbdist.export.source.source_edits import Edit, edited, parse, segment

_WITHOUT_EFFECT = {"autoreload", "config", "load_ext", "matplotlib", "precision", "reload_ext", "xmode", "colors"}
_INSTALLERS = {"pip", "conda", "mamba", "micromamba", "uv"}
_INTERACTIVE = {"input", "get_ipython"}


class NotExportable(Exception):
    """Raised for code that a script can't have, with the reason as its text."""


@dataclass
class Plain:
    """Plain Python, and what it needs.

    Attributes:
        text: The source; "": nothing is to be done.
        modules: What it needs imported.
        note: What the user has to know.
    """

    text: str
    modules: set[str] = field(default_factory=set)
    note: str = ""


def plain_part(part: CodePart, *, show: bool = True) -> Plain:
    """Return a part of a cell as plain Python.

    Args:
        part: The part. If it is a magic, it is not one of nbdist.
        show: Whether to print the value that the notebook shows.

    Raises:
        NotExportable: There is no counterpart.
    """
    if part.directive is not None:
        return plain_directive(part.directive)
    if names := sorted({*_called(part.tree)} & _INTERACTIVE - {"get_ipython"}):
        raise NotExportable(f"a script has no {names[0]}()")
    edits, modules = [], set()
    for call, directive in shell_calls(part.tree):
        if directive is None:
            raise NotExportable("a script has no get_ipython()")
        found = _expression(directive)
        edits.append(Edit(call, found.text))
        modules |= found.modules
    if "get_ipython" in part.used and not edits:
        raise NotExportable("a script has no get_ipython()")
    for waiting in _top_awaits(part):
        edits.append(Edit(waiting, f"asyncio.run({segment(part.text, waiting.value)})"))
        modules.add("asyncio")
    value = part.value if show else None
    note = "breakpoint() finds no terminal under torchrun" if "breakpoint" in _called(part.tree) else ""
    if value is None:
        return Plain(edited(part.text, edits), modules, note)
    if edits:
        return Plain(_shown(parse(edited(part.text, edits)), edited(part.text, edits)), modules, note)
    return Plain(_shown(part.tree, part.text), modules, note)


def _shown(tree: ast.Module, text: str) -> str:
    last = tree.body[-1]
    assert isinstance(last, ast.Expr)
    return edited(text, [Edit(last, f"show({segment(text, last)})")])


def _called(tree: ast.AST) -> set[str]:
    calls = (node.func for node in ast.walk(tree) if isinstance(node, ast.Call))
    return {function.id for function in calls if isinstance(function, ast.Name)}


def _top_awaits(part: CodePart) -> Iterator[ast.Await]:
    """Return what is awaited outside of a function.

    Raises:
        NotExportable: A loop or block is asynchronous.
    """
    waiting: list[ast.AST] = list(part.statements)
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if isinstance(node, ast.AsyncFor | ast.AsyncWith):
            raise NotExportable("`async for` and `async with` need a function in a script")
        if isinstance(node, ast.Await):
            yield node
            continue
        waiting += ast.iter_child_nodes(node)


def plain_directive(directive: Directive) -> Plain:
    """Return a magic or shell line that is a statement as plain Python.

    Raises:
        NotExportable: There is no counterpart.
    """
    name, line = directive.name, directive.line.strip()
    if directive.kind == "cell":
        return _plain_cell(directive)
    if _installs(directive):
        command = line if directive.kind == "shell" else f"{name} {line}"
        return Plain(f"# {command}", note=f"{command!r} is a comment: install it where the script runs")
    if directive.kind == "shell":
        return _expression(directive)
    if name in _WITHOUT_EFFECT:
        return Plain("")
    if name == "env" and line:
        variable, _, value = line.partition("=") if "=" in line else line.partition(" ")
        return Plain(f"os.environ[{variable.strip()!r}] = {_text(value.strip())}", {"os"})
    if name == "cd" and line:
        return Plain(f"os.chdir(os.path.expanduser({_text(line)}))", {"os"})
    if name == "run":
        return _plain_run(line)
    if name == "time" and line:
        return Plain(line)
    return _expression(directive)


def _installs(directive: Directive) -> bool:
    if directive.kind == "line":
        return directive.name in _INSTALLERS
    words = directive.line.split()
    return bool(words) and (words[0] in _INSTALLERS or words[1:3] == ["-m", "pip"])


def _plain_cell(directive: Directive) -> Plain:
    if directive.name != "writefile":
        return Plain(f"subprocess.run([{directive.name!r}, '-c', {directive.body!r}], check=True)", {"subprocess"})
    words = shlex.split(directive.line)
    files = [word for word in words if word not in ("-a", "--append")]
    if len(files) != 1:
        raise NotExportable("%%writefile needs the name of a file")
    mode = "w" if len(words) == 1 else "a"
    return Plain(f"with open({files[0]!r}, {mode!r}) as file:\n    file.write({directive.body!r})")


def _plain_run(line: str) -> Plain:
    words = shlex.split(line)
    if not words or (words[0].startswith("-") and words[0] != "-m"):
        raise NotExportable(f"`%run {line}` has options that a script has no counterpart for")
    is_module = words[0] == "-m"
    words = words[1:] if is_module else words
    how = "run_module" if is_module else "run_path"
    text = f"sys.argv = {words!r}\nglobals().update(runpy.{how}({words[0]!r}, run_name='__main__'))"
    return Plain(text, {"runpy", "sys"})


def _expression(directive: Directive) -> Plain:
    if directive.kind == "shell" and directive.name == "getoutput":
        return Plain(f"subprocess.getoutput({_text(directive.line)}).splitlines()", {"subprocess"})
    if directive.kind == "shell":
        return Plain(f"subprocess.run({_text(directive.line)}, shell=True)", {"subprocess"})
    if directive.name == "time" and directive.line.strip():
        return Plain(f"({directive.line.strip()})")
    raise NotExportable(f"`{directive}` has no counterpart in a script")


def _text(line: str) -> str:
    """Return a literal for text in which IPython replaces {expressions}."""
    if "{" not in line:
        return repr(line)
    try:
        ast.parse(f"f{line!r}")
    except SyntaxError:
        return repr(line)
    return f"f{line!r}"
