"""Writes `%distributed ...` and other magics of the notebook's own cells into the script."""

from __future__ import annotations

import argparse
import ast
from typing import Any

from nbdist.client.magic_lines.magic_line import HelpShown, without_comment
from nbdist.client.magic_lines.parsers import verb_parsers
from nbdist.client.magic_lines.plan_line import named_settings
from nbdist.errors import UsageError
from nbdist.export.draft import RankStart, ScriptDraft, ranks_test
from nbdist.export.sorted_cells import SortedCell
from nbdist.export.source.code_parts import CodePart, Directive
from nbdist.export.source.plain_python import NotExportable, plain_directive
from nbdist.export.source.source_edits import indented, renamed
from nbdist.plan import Plan
from nbdist.planning.settings import SETTINGS

_SHOWS = {
    *("advise", "auto", "flight", "free", "logs", "look", "memory", "panel", "peak", "snapshot", "stacks"),
    *("status", "tflops", "variables", "why"),
}


def is_session_line(directive: Directive) -> bool:
    """Return whether a magic is one of nbdist."""
    return directive.kind == "line" and directive.name in ("distributed", "dist")


def read_session_line(directive: Directive) -> tuple[str, argparse.Namespace]:
    """Return the verb and the arguments of a `%distributed` line.

    Raises:
        NotExportable: It is wrong, or asks for help.
    """
    verb, _, rest = without_comment(directive.line).strip().partition(" ")
    parser = verb_parsers().get(verb)
    if parser is None:
        raise NotExportable("it shows help" if verb in ("", "help", "-h", "--help") else f"there is no verb {verb!r}")
    try:
        return verb, parser.read(rest)
    except HelpShown:
        raise NotExportable("it shows help") from None
    except UsageError as error:
        raise NotExportable(str(error)) from None


def write_session_line(cell: SortedCell, part: CodePart, draft: ScriptDraft) -> None:
    """Write a magic or shell line of the notebook."""
    directive = part.directive
    assert directive is not None
    try:
        if is_session_line(directive):
            _write_verb(cell, directive, draft)
        else:
            _write_other(cell, directive, draft)
    except NotExportable as hindrance:
        draft.note(cell, f"left out: `{directive}`: {hindrance}")


def _write_other(cell: SortedCell, directive: Directive, draft: ScriptDraft) -> None:
    plain = plain_directive(directive)
    draft.modules |= plain.modules
    if plain.note:
        draft.note(cell, plain.note)
    if plain.text.startswith("#"):
        draft.lines.append(plain.text)
    elif directive.name in ("env", "cd"):
        draft.add_for_all(plain.text)
    elif plain.text:
        draft.add_for_notebook(f"if rank == 0:\n{indented(renamed(plain.text, draft.others))}", quick=False)


def _write_verb(cell: SortedCell, directive: Directive, draft: ScriptDraft) -> None:
    if directive.name and directive.line.split()[:1] == ["start"] and "{" in directive.line:
        draft.start = draft.start or RankStart()
        _read_start_with_braces(directive, draft.start)
        return
    verb, arguments = read_session_line(directive)
    if verb == "start":
        draft.start = draft.start or start_of(arguments)
    elif verb == "push":
        _push(arguments, draft)
    elif verb == "pull":
        _pull(arguments, draft)
    elif verb == "plan":
        _plan(arguments, draft)
    elif verb in _SHOWS:
        draft.note(cell, f"left out: `{directive}`, which is about the session")
    elif verb != "stop":
        raise NotExportable("a script has no session")


def _read_start_with_braces(directive: Directive, start: RankStart) -> None:
    """Read a line whose values are known only when the notebook runs."""
    words = directive.line.split()[1:]
    rest: list[str] = []
    braces = 0
    for word in words:  # {ranks // 2} is three words
        braces += word.count("{")
        if not braces:
            rest.append(word)
        elif rest and rest[-1].startswith("-"):
            start.count = "?" if rest.pop() in ("-n", "--num-processes") else start.count
        braces -= word.count("}")
    try:
        known = start_of(verb_parsers()["start"].read(" ".join(rest)))
    except (UsageError, HelpShown):
        return
    known.count = start.count or known.count
    vars(start).update(vars(known))


def start_of(arguments: argparse.Namespace) -> RankStart:
    """Return how `%distributed start` starts ranks with these arguments."""
    gpus = arguments.gpus or ""
    return RankStart(
        count=str(arguments.num_processes or ""),
        nodes=arguments.num_nodes or 1,
        gpus=gpus if isinstance(gpus, str) else ",".join(map(str, gpus)),
        backend=arguments.backend or "",
        init=arguments.init,
        restarts=arguments.on_death == "heal",
    )


def start_of_call(call: ast.Call) -> RankStart:
    """Return how a call of `nbdist.Session` starts ranks."""
    given: dict[str, ast.expr] = {each.arg: each.value for each in call.keywords if each.arg}
    if call.args:
        given["num_processes"] = call.args[0]
    known: dict[str, Any] = {name: value.value for name, value in given.items() if isinstance(value, ast.Constant)}
    count = known.get("num_processes", "?" if "num_processes" in given else "")
    return RankStart(
        count=str(count or ""),
        nodes=int(known.get("num_nodes") or 1),
        backend=str(known.get("backend") or ""),
        init=known.get("init", True) is not False,
        restarts=known.get("on_death") == "heal",
    )


def _push(arguments: argparse.Namespace, draft: ScriptDraft) -> None:
    if arguments.ranks is not None:
        raise NotExportable("only some ranks get it")
    for name in arguments.names:
        other = draft.others.get(name)
        if other is None:
            draft.give_to_all([name])
            continue
        draft.helpers.add("from_rank_0")
        if other in draft.definitions or name in draft.everywhere:
            mutable = name in draft.mutable
            draft.modules |= {"copy"} if mutable else set()
            draft.lines.append(f"{name} = copy.deepcopy({other})" if mutable else f"{name} = {other}")
        else:
            draft.modules.add("copy")
            draft.add_together(f"{name} = from_rank_0(copy.deepcopy({other}) if rank == 0 else None)")


def _pull(arguments: argparse.Namespace, draft: ScriptDraft) -> None:
    which = ""
    if arguments.ranks is not None and arguments.ranks.lower() != "all":
        condition = ranks_test(arguments.ranks).partition(" ")[2]
        number = condition.removeprefix("== ")
        which = f"[{number}]" if number.isdecimal() else f"[{condition.removeprefix('in ')}]"
    draft.helpers.add("everyone")
    for name in arguments.names:
        target = arguments.target or name
        value = f"everyone({name})"
        if which.startswith("[("):
            value = f"[{value}[number] for number in {which[1:-1]}]"
        else:
            value += which
        draft.add_together(f"{draft.others.get(target, target)} = {value}")
        draft.everywhere.add(target)


def _plan(arguments: argparse.Namespace, draft: ScriptDraft) -> None:
    changes = named_settings(arguments)
    if arguments.strategy == "auto" or not (arguments.source is arguments.config is arguments.write is None):
        raise NotExportable("it depends on the machine: write the plan that it has proposed")
    if not changes and not arguments.reset:
        return
    try:
        draft.plan = (Plan() if arguments.reset else draft.plan).replace(**changes)
    except UsageError as error:
        raise NotExportable(str(error)) from None
    draft.helpers.add("nbdist")
    draft.lines.append(f"nbdist.set_plan({plan_text(draft.plan)})")


def plan_text(plan: Plan) -> str:
    """Return a plan as it is written in Python."""
    default = Plan()
    values = {name: getattr(plan, name) for name in SETTINGS if getattr(plan, name) != getattr(default, name)}
    strategy = [repr(plan.strategy)]
    values.pop("strategy", None)
    return f"nbdist.Plan({', '.join([*strategy, *(f'{name}={value!r}' for name, value in values.items())])})"
