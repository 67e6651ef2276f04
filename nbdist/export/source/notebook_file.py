"""Reads a notebook's cells from its file. Independent of what is in them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nbdist.errors import UsageError


@dataclass(frozen=True)
class NotebookCell:
    """A cell of a notebook, as its file has it.

    Attributes:
        number: Its position among the cells with code, from 1; 0 for text.
        source: What is in it.
        is_code: Whether it is code; otherwise it is Markdown.
        tags: Its tags.
        count: The number that the notebook shows beside it; None: it has not been run.
        failed: Whether it ended with an error when it was run last.
    """

    number: int
    source: str
    is_code: bool
    tags: frozenset[str]
    count: int | None
    failed: bool

    @property
    def expected_to_fail(self) -> bool:
        """Whether it has the tag that lets a notebook go on after its error."""
        return "raises-exception" in self.tags


def read_notebook(path: Path) -> list[NotebookCell]:
    """Return the cells of a notebook with code or Markdown.

    Raises:
        UsageError: The file can't be read, or is not a notebook.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise _not_a_notebook(path, "it is not text") from None
    except OSError as error:
        raise UsageError(f"{path} can't be read ({error.strerror}): pass the path of a notebook") from None
    try:
        content = json.loads(text)
    except (ValueError, RecursionError):
        raise _not_a_notebook(path, "it is not JSON") from None
    cells = content.get("cells") if isinstance(content, dict) else None
    if not isinstance(cells, list):
        old = isinstance(content, dict) and "worksheets" in content
        raise _not_a_notebook(
            path, "its format is older than version 4: open it in Jupyter and save it" if old else "it has no cells"
        )
    found: list[NotebookCell] = []
    try:
        for cell in cells:
            if cell["cell_type"] in ("code", "markdown"):
                found.append(_cell(cell, sum(each.is_code for each in found) + 1))
    except (AttributeError, KeyError, TypeError):
        raise _not_a_notebook(path, f"cell {len(found) + 1} is malformed") from None
    return found


def _cell(cell: Any, number: int) -> NotebookCell:
    source = cell["source"]
    is_code = cell["cell_type"] == "code"
    outputs = cell.get("outputs", [])
    count = cell.get("execution_count")
    return NotebookCell(
        number if is_code else 0,
        source if isinstance(source, str) else "".join(source),
        is_code,
        frozenset(cell.get("metadata", {}).get("tags", [])),
        count if isinstance(count, int) else None,
        any(output.get("output_type") == "error" for output in outputs),
    )


def _not_a_notebook(path: Path, why: str) -> UsageError:
    return UsageError(f"{path} is not a notebook: {why}. Pass a file of Jupyter, such as train.ipynb")
