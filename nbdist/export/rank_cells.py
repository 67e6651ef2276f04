"""Writes the cells that ranks run into the script: as they are, on all of its ranks or under a condition."""

from __future__ import annotations

from nbdist.export.draft import ScriptDraft, ranks_test
from nbdist.export.sorted_cells import SortedCell
from nbdist.export.source.code_parts import CodePart
from nbdist.export.source.plain_python import NotExportable, Plain, plain_directive, plain_part
from nbdist.export.source.source_edits import indented, parse

_OUTPUT_ONLY = ("capture", "profile", "timeout")


def write_rank_cell(cell: SortedCell, draft: ScriptDraft) -> None:
    """Write a cell that ranks run."""
    if missing := _missing(cell, draft):
        return draft.leave_out(cell, missing, _bound(cell))
    texts = [text for part in cell.parts if (text := _plain(cell, part, draft))]
    if cell.directive is not None:
        plain = plain_directive(cell.directive)
        draft.modules |= plain.modules
        texts = [plain.text]
    _tell_of_flags(cell, draft)
    if not texts:
        return None
    text = "\n".join(texts)
    if cell.ranks:
        text = text if parse(text).body else f"{text}\npass"
        text = f"if {ranks_test(cell.ranks)}:\n{indented(text)}"
    return draft.add_for_all(text)


def _plain(cell: SortedCell, part: CodePart, draft: ScriptDraft) -> str:
    """Return a part as plain Python; "" where nothing is to be done."""
    try:
        plain: Plain = plain_part(part)
    except NotExportable as hindrance:
        return draft.omitted(cell, str(hindrance), part.bound, part.shown)
    draft.modules |= plain.modules
    draft.of_ranks |= part.bound
    draft.gone = {name: where for name, where in draft.gone.items() if name not in part.bound}
    if "show(" in plain.text and part.value is not None:
        draft.helpers.add("show")
    if plain.note:
        draft.note(cell, plain.note)
    return plain.text


def _missing(cell: SortedCell, draft: ScriptDraft) -> str:
    """Return why a cell can't run: it uses what only code that was left out sets."""
    known: set[str] = set()
    for part in cell.parts:
        if lost := sorted((part.used - part.bound - known) & draft.gone.keys()):
            return f"it uses {lost[0]!r} of cell {draft.gone[lost[0]]}, which is left out"
        known |= part.bound
    return ""


def _bound(cell: SortedCell) -> set[str]:
    return {name for part in cell.parts for name in part.bound}


def _tell_of_flags(cell: SortedCell, draft: ScriptDraft) -> None:
    if cell.in_background:
        draft.note(cell, "runs where it stands, not in the background")
    for name in _OUTPUT_ONLY:
        if cell.flags is not None and getattr(cell.flags, name) is not None:
            draft.note(cell, f"without --{name}")
