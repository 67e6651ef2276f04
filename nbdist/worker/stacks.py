"""A thread's stack as people read it: from the user's cell inwards. Knows nothing of ranks or the wire."""

from __future__ import annotations

import os
import traceback
import types

_OURS = __file__.rsplit("/", 2)[0]
_CELL = "<ipython-input"


def describe(frame: types.FrameType) -> tuple[str, str]:
    """Where a thread is.

    Returns:
        One line ("cell 7 line 4: dist.barrier() (in barrier, distributed_c10d.py:4811)"), and the whole stack.
    """
    entries = [entry for entry in traceback.extract_stack(frame) if not entry.filename.startswith(_OURS)]
    cell = [entry for entry in entries if entry.filename.startswith(_CELL)]
    line = _line(cell[-1], entries[-1]) if cell else ""
    return line, "".join(traceback.format_list(_from_cell(entries)))


def _from_cell(entries: list[traceback.FrameSummary]) -> list[traceback.FrameSummary]:
    """The frames from the cell on; what IPython does before is nobody's concern."""
    for index, entry in enumerate(entries):
        if entry.filename.startswith(_CELL):
            return entries[index:]
    return entries


def _line(cell: traceback.FrameSummary, inner: traceback.FrameSummary) -> str:
    number = cell.filename.split("-")[2]
    place = f"cell {number} line {cell.lineno}: {(cell.line or '').strip()}"
    if inner is cell:
        return place
    return f"{place} (in {inner.name}, {os.path.basename(inner.filename)}:{inner.lineno})"
