"""Which cells of a notebook go into the script, in which order, and under which names."""

from __future__ import annotations

import builtins
from collections.abc import Iterator, Sequence

from nbdist.errors import UsageError
from nbdist.export.draft import ScriptDraft, commented
from nbdist.export.notebook_cells import write_notebook_cell
from nbdist.export.rank_cells import write_rank_cell
from nbdist.export.session_calls import made_session
from nbdist.export.session_lines import is_session_line, read_session_line, start_of_call
from nbdist.export.sorted_cells import SortedCell, sort_cells
from nbdist.export.source.code_parts import CodePart
from nbdist.export.source.notebook_file import NotebookCell
from nbdist.export.source.plain_python import NotExportable, plain_directive, plain_part

_OWN_NAMES = {"backend", "device", "dist", "gpus", "local_rank", "local_world_size", "rank", "torch", "world_size"}


def draft_of(cells: Sequence[NotebookCell], *, as_run: bool) -> tuple[ScriptDraft, list[str]]:
    """Return the script as a draft, and what the user has to know of the whole.

    Args:
        cells: The notebook.
        as_run: Whether cells are in the order in which they were run.

    Raises:
        UsageError: No cell has been run.
    """
    remarks = _remarks(cells, as_run)
    code = sort_cells(cells)
    if as_run:
        code.sort(key=lambda each: each.cell.count or 0)
    draft = ScriptDraft()
    on_ranks = any(each.on_ranks for each in code) or any(_starts(each) for each in code)
    if on_ranks:
        draft.others = _other_names(code)
        _find_start(code, draft)
        code = _with_the_first_ranks(code, draft)
    by_number = {each.cell.number: each for each in code}
    for cell in [each.cell for each in code] if as_run else cells:
        if not cell.is_code:
            draft.blocks.append(f"# %% [markdown]\n{commented(cell.source)}")
        elif cell.number in by_number:
            _write(by_number[cell.number], code, draft, as_run=as_run, on_ranks=on_ranks)
            draft.end_cell(f"cell {cell.number}")
    return draft, remarks


def _remarks(cells: Sequence[NotebookCell], as_run: bool) -> list[str]:
    counts = [cell.count for cell in cells if cell.is_code and cell.count is not None]
    if as_run and not counts:
        raise UsageError("no cell of the notebook has been run since it was saved last: leave out --as-run")
    if not as_run and counts != sorted(counts):
        return ["The cells were run in another order than the notebook's; `nbdist export --as-run` follows it."]
    if as_run and len(counts) < max(counts) - min(counts) + 1:
        return ["Some cells were run more than once, or are gone: the notebook has only the last run of each cell."]
    return []


# --- the ranks of the notebook


def _verbs(cell: SortedCell) -> Iterator[str]:
    for directive in cell.directives:
        if is_session_line(directive):
            yield directive.line.split()[0] if directive.line.split() else ""


def _sessions(cell: SortedCell) -> list[CodePart]:
    """Return the parts that make a session in Python."""
    calls = ((part, made_session(part)) for part in cell.parts if part.statements)
    return [part for part, call in calls if call is not None and "Session" in part.used | _attributes(part)]


def _attributes(part: CodePart) -> set[str]:
    return {"Session"} if "nbdist.Session(" in part.text else set()


def _starts(cell: SortedCell) -> bool:
    return not cell.on_ranks and ("start" in _verbs(cell) or bool(_sessions(cell)))


def _find_start(code: Sequence[SortedCell], draft: ScriptDraft) -> None:
    """Note how the first session is started, if it is in Python."""
    for cell in code:
        for part in [] if cell.on_ranks else _sessions(cell):
            call = made_session(part)
            if draft.start is None and call is not None:
                draft.start = start_of_call(call)


def _with_the_first_ranks(code: list[SortedCell], draft: ScriptDraft) -> list[SortedCell]:
    """Return the cells until the ranks are replaced by others, which a script can't do."""
    for position, cell in enumerate(code):
        verbs = [] if cell.on_ranks else list(_verbs(cell))
        ends = "restart" in verbs or "stop" in verbs
        again = "restart" in verbs or any(_starts(each) for each in code[position + 1 :])
        again = again or ("stop" in verbs and "start" in verbs[verbs.index("stop") :])
        if ends and again and any(each.on_ranks for each in code[:position]):
            draft.note(
                cell, "left out with all cells below: from here on there are other ranks; make them another notebook"
            )
            return code[:position]
    return code


# --- names


def _other_names(code: Sequence[SortedCell]) -> dict[str, str]:
    """Return new names for those that mean one thing in the notebook and another on ranks."""
    on_ranks, local, pushed = set(_OWN_NAMES) | set(dir(builtins)), set[str](), set[str]()
    used_after_push: set[str] = set()
    for cell in code:
        for part in cell.parts:
            names = set() if part.is_import else part.bound
            (on_ranks if cell.on_ranks else local).update(names)
            if cell.on_ranks or part.directive is None:
                used_after_push |= set() if cell.on_ranks else part.used & pushed
            elif is_session_line(part.directive):
                changed, got = _moved(part)
                pushed |= changed
                local |= got
    values = {name for name in used_after_push if not _is_defined(name, code)}
    return {name: f"notebook_{name}" for name in local & (on_ranks | values) if name != "_"}


def _moved(part: CodePart) -> tuple[set[str], set[str]]:
    """Return the names that a line pushes, and those that it pulls."""
    assert part.directive is not None
    try:
        verb, arguments = read_session_line(part.directive)
    except NotExportable:
        return set(), set()
    if verb == "push":
        return set(arguments.names), set()
    if verb == "pull":
        return set(), {arguments.target} if arguments.target else set(arguments.names)
    return set(), set()


def _is_defined(name: str, code: Sequence[SortedCell]) -> bool:
    """Return whether a name is a function or class, which ranks can't change for the notebook."""
    return any(name in part.bound and part.is_definition for cell in code for part in cell.parts)


# --- cells


def _write(cell: SortedCell, code: Sequence[SortedCell], draft: ScriptDraft, *, as_run: bool, on_ranks: bool) -> None:
    if why := _reason(cell, code, as_run):
        draft.leave_out(cell, why, (name for part in cell.parts for name in part.bound))
        return
    if cell.cell.failed:
        draft.note(cell, "it failed when it was run last")
    try:
        if not on_ranks:
            _copy(cell, draft)
        elif cell.on_ranks:
            write_rank_cell(cell, draft)
        else:
            write_notebook_cell(cell, draft)
    except NotExportable as hindrance:
        draft.leave_out(cell, str(hindrance), (name for part in cell.parts for name in part.bound))
    if cell.flags is not None and cell.flags.capture:
        draft.gone[cell.flags.capture] = cell.cell.number


def _reason(cell: SortedCell, code: Sequence[SortedCell], as_run: bool) -> str:
    """Return why a cell is left out as a whole; "": it is not."""
    if cell.trouble:
        return cell.trouble
    if as_run and cell.cell.count is None:
        return "it has not been run"
    if cell.cell.expected_to_fail:
        return "it is meant to fail (tag raises-exception)"
    if cell.in_background and _is_interrupted(cell, code):
        return "it runs in the background until the notebook interrupts it"
    return ""


def _is_interrupted(cell: SortedCell, code: Sequence[SortedCell]) -> bool:
    for later in code[code.index(cell) + 1 :]:
        if later.on_ranks:
            return False
        if later.cell.expected_to_fail or "interrupt" in _verbs(later):
            return True
    return False


def _copy(cell: SortedCell, draft: ScriptDraft) -> None:
    """Write a cell of a notebook without ranks, or whose ranks `notebook_launcher` starts: as it is."""
    if cell.directive is not None:
        plain = plain_directive(cell.directive)
        draft.modules |= plain.modules
        draft.lines.append(plain.text)
    for part in cell.parts:
        try:
            if part.directive is not None and is_session_line(part.directive):
                raise NotExportable("it is about the session")
            if lost := sorted((part.used - part.bound) & draft.gone.keys()):
                raise NotExportable(f"it uses {lost[0]!r} of cell {draft.gone[lost[0]]}, which is left out")
            plain = plain_part(part)
        except NotExportable as hindrance:
            draft.leave_out(cell, str(hindrance), part.bound, part.shown)
            continue
        draft.everywhere |= part.bound
        draft.modules |= plain.modules
        if plain.note:
            draft.note(cell, plain.note)
        if part.value is not None:
            draft.helpers.add("show")
        if plain.text:
            draft.lines.append(plain.text)
