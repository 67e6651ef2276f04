"""Writes what the notebook itself does into the script: definitions and constants on all ranks, the rest on rank 0."""

from __future__ import annotations

import ast
import sys

from nbdist.export.draft import ScriptDraft
from nbdist.export.session_calls import made_session, uses_session, without_session
from nbdist.export.session_lines import write_session_line
from nbdist.export.sorted_cells import SortedCell
from nbdist.export.source.code_parts import CodePart
from nbdist.export.source.plain_python import NotExportable, plain_directive, plain_part
from nbdist.export.source.source_edits import indented, renamed

_LAUNCHERS = {"notebook_launcher", "debug_launcher"}
_PLAIN_CALLS = {"Plan", "nbdist.Plan", "torch.device"}  # whose value is the same on all ranks
_NO_CONSTANT = ast.Await | ast.Lambda | ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp | ast.NamedExpr
# Packages that draw no random numbers of torch, numpy, or Python.
_NOT_RANDOM = (sys.stdlib_module_names - {"random"}) | {"IPython", "matplotlib", "nbdist", "pandas", "tqdm"}
_TORCH_WITHOUT_RANDOM = {
    *("arange", "cat", "cuda", "device", "equal", "float32", "from_numpy", "full", "is_tensor", "load", "no_grad"),
    *("ones", "save", "stack", "tensor", "zeros"),
}


def write_notebook_cell(cell: SortedCell, draft: ScriptDraft) -> None:
    """Write a cell that the notebook runs."""
    if cell.directive is not None:
        plain = plain_directive(cell.directive)
        draft.modules |= plain.modules
        return draft.add_for_notebook(f"if rank == 0:\n{indented(plain.text)}", quick=False)
    alone: list[CodePart] = []
    for part in cell.parts:
        if _is_for_all(cell, part, draft):
            _write_alone(cell, alone, draft)
            alone = []
            _write_for_all(cell, part, draft)
        elif why := _hindrance(part, draft):
            draft.leave_out(cell, why, part.bound, part.shown)
        else:
            alone.append(part)
    return _write_alone(cell, alone, draft)


def _hindrance(part: CodePart, draft: ScriptDraft) -> str:
    """Return why a part that needs no ranks can't be in a script; "": it can."""
    if lost := sorted((part.used - part.bound) & draft.gone.keys()):
        return f"it uses {lost[0]!r} of cell {draft.gone[lost[0]]}, which is left out"
    if "_" in part.used - part.bound:
        return "it uses the output of another cell, `_`"
    if launcher := sorted(part.used & _LAUNCHERS):
        return f"{launcher[0]} starts other ranks: make it a notebook of its own"
    if draft.sessions & part.used:
        return "it asks for something of the session"
    return ""


def _is_for_all(cell: SortedCell, part: CodePart, draft: ScriptDraft) -> bool:
    directive = part.directive
    if directive is not None:
        return True
    if made_session(part) is not None or uses_session(part, draft.sessions):
        return True
    if part.is_import:
        return True
    if part.is_definition:
        return not _evaluated(part) & draft.local
    return _is_constant(part, draft)


def _evaluated(part: CodePart) -> set[str]:
    """Return the names that the definition itself reads: decorators, defaults, bases."""
    names: set[str] = set()
    for node in part.statements:
        outer: list[ast.AST] = list(getattr(node, "decorator_list", [])) + list(getattr(node, "bases", []))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            outer += [*node.args.defaults, *(each for each in node.args.kw_defaults if each is not None)]
        names |= {each.id for tree in outer for each in ast.walk(tree) if isinstance(each, ast.Name)}
    return names


def _is_constant(part: CodePart, draft: ScriptDraft) -> bool:
    """Return whether a part sets names to what is the same on all ranks: literals, and what is made of them."""
    for statement in part.statements:
        if not isinstance(statement, ast.Assign | ast.AnnAssign) or statement.value is None:
            return False
        targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
        if not all(isinstance(each, ast.Name | ast.Tuple) for each in targets):
            return False
        for node in ast.walk(statement.value):
            if isinstance(node, ast.Call) and ast.unparse(node.func) not in _PLAIN_CALLS:
                return False
            if isinstance(node, ast.Name) and node.id not in draft.everywhere:
                return False
            if isinstance(node, _NO_CONSTANT) or (isinstance(node, ast.Attribute) and not _is_plain(node)):
                return False
    return True


def _is_plain(node: ast.Attribute) -> bool:
    return ast.unparse(node) in _PLAIN_CALLS or (isinstance(node.value, ast.Name) and node.value.id == "torch")


def _write_for_all(cell: SortedCell, part: CodePart, draft: ScriptDraft) -> None:
    if part.directive is not None:
        return write_session_line(cell, part, draft)
    if made_session(part) is not None:
        draft.sessions |= part.bound
        return None
    if uses_session(part, draft.sessions):
        return _write_session_call(cell, part, draft)
    _remember(part, draft)
    draft.everywhere |= part.bound
    draft.local -= part.bound
    draft.gone = {name: where for name, where in draft.gone.items() if name not in part.bound}
    return draft.lines.append(renamed(part.text, draft.others))


def _remember(part: CodePart, draft: ScriptDraft) -> None:
    """Keep what later decisions need to know of a part that all ranks run."""
    for node in part.statements:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names = {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}
            draft.definitions[node.name] = frozenset(names)
        elif isinstance(node, ast.Import):
            draft.imported.update({_name(alias): alias.name.partition(".")[0] for alias in node.names})
        elif isinstance(node, ast.ImportFrom):
            draft.imported.update({_name(alias): (node.module or "").partition(".")[0] for alias in node.names})
    if any(isinstance(each, ast.List | ast.Dict | ast.Set) for each in ast.walk(part.tree)):
        draft.mutable |= part.bound


def _name(alias: ast.alias) -> str:
    return (alias.asname or alias.name).partition(".")[0]


def _write_session_call(cell: SortedCell, part: CodePart, draft: ScriptDraft) -> None:
    statement = part.statements[0]
    if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Name):
        return None  # the session itself is shown
    try:
        text, helpers = without_session(part, draft.sessions)
    except NotExportable as hindrance:
        return draft.leave_out(cell, str(hindrance), part.bound, part.shown)
    draft.helpers |= helpers
    draft.give_to_all(part.used - draft.sessions)
    draft.everywhere |= part.bound
    draft.add_together(renamed(text, {name: other for name, other in draft.others.items() if name in part.bound}))
    if part.value is not None:
        draft.helpers.add("show")
        draft.lines.append(f"shown = {draft.lines.pop().strip()}\nif rank == 0:\n    show(shown)")
    return None


def _write_alone(cell: SortedCell, parts: list[CodePart], draft: ScriptDraft) -> None:
    """Write what rank 0 does alone."""
    texts = []
    quick = True
    for part in parts:
        try:
            plain = plain_part(part)
        except NotExportable as hindrance:
            draft.leave_out(cell, str(hindrance), part.bound, part.shown)
            continue
        texts.append(renamed(plain.text, draft.others))
        draft.modules |= plain.modules
        if plain.note:
            draft.note(cell, plain.note)
        if part.value is not None:
            draft.helpers.add("show")
        draft.local |= part.bound | part.used & draft.mutable
        draft.everywhere -= part.bound
        draft.gone = {name: where for name, where in draft.gone.items() if name not in part.bound}
        quick = quick and not any(isinstance(node, ast.Call) for node in ast.walk(part.tree))
    if not texts:
        return
    text = "\n".join(texts)
    above = "\n" * (len(text) - len(text.lstrip("\n")))
    text = text.lstrip("\n")
    if any(_draws_random_numbers(part, draft) for part in parts):
        draft.helpers.add("notebook_random_numbers")
        text = f"with notebook_random_numbers():\n{indented(text)}"
    draft.add_for_notebook(f"{above}if rank == 0:\n{indented(text)}", quick=quick)


def _draws_random_numbers(part: CodePart, draft: ScriptDraft) -> bool:
    """Return whether a part may change the state of a random generator that ranks use as well."""
    harmless = {
        node.value
        for node in ast.walk(part.tree)
        if isinstance(node, ast.Attribute) and node.attr in _TORCH_WITHOUT_RANDOM
    }
    direct = {node.id for node in ast.walk(part.tree) if isinstance(node, ast.Name) and node not in harmless}
    reached = draft.reached(direct)
    return any(draft.imported.get(name, "os") not in _NOT_RANDOM for name in reached)
