"""Where each cell of a notebook runs, on ranks or in the notebook, and its code without the magics that say so."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from IPython.core.inputtransformer2 import TransformerManager

from nbdist.client.costs.cell_memory import first_code
from nbdist.client.magic_lines.magic_line import HelpShown, without_comment
from nbdist.client.magic_lines.parsers import cell_parser
from nbdist.client.magics.router import STAYS_HERE
from nbdist.errors import UsageError
from nbdist.export.source.code_parts import CodePart, Directive, parts_of
from nbdist.export.source.notebook_file import NotebookCell

_CELL_MAGIC = re.compile(r"%%(\w+)[ \t]*(.*)")
_AUTO = re.compile(r"^%(?:distributed|dist)[ \t]+auto[ \t]+(on|off)\b", re.MULTILINE)
_RANKS = re.compile(r"(all|\d+(\s*-\s*\d+)?(\s*,\s*\d+(\s*-\s*\d+)?)*)", re.IGNORECASE)
_AS_CODE = ("bash", "sh", "writefile")  # what a script can do by other means


@dataclass
class SortedCell:
    """A cell with code, and where it runs.

    Attributes:
        cell: As the file has it.
        on_ranks: Whether ranks run it.
        flags: Of `%%distributed`; None: it has none.
        parts: Its code.
        directive: The cell magic of IPython that has the rest of the cell as its body.
        ignored: Magics that change nothing of what is computed: `%%time`.
        trouble: Why it can't be exported; "": it can.
    """

    cell: NotebookCell
    on_ranks: bool = False
    flags: argparse.Namespace | None = None
    parts: list[CodePart] = field(default_factory=list)
    directive: Directive | None = None
    ignored: list[str] = field(default_factory=list)
    trouble: str = ""

    @property
    def in_background(self) -> bool:
        """Whether the notebook went on while it ran."""
        return self.flags is not None and bool(self.flags.background)

    @property
    def ranks(self) -> str:
        """The ranks that run it, as they were typed; "": all."""
        ranks = "" if self.flags is None or self.flags.ranks is None else str(self.flags.ranks).strip()
        return "" if ranks.lower() == "all" else ranks

    @property
    def directives(self) -> Iterator[Directive]:
        """Its line magics and shell lines that are statements."""
        yield from (part.directive for part in self.parts if part.directive is not None)


def sort_cells(cells: Iterable[NotebookCell]) -> list[SortedCell]:
    """Return the cells with code, each with where it runs."""
    found = []
    auto = False
    for cell in cells:
        if cell.is_code:
            found.append(_sorted_cell(cell, auto))
            for switch in _AUTO.findall(cell.source):
                auto = switch == "on"
    return found


def _sorted_cell(cell: NotebookCell, auto: bool) -> SortedCell:
    found = SortedCell(cell)
    first = first_code(cell.source.splitlines())
    if auto and first is not None:
        found.on_ranks = not STAYS_HERE.match(cell.source.splitlines()[first].strip())
    try:
        rest = _without_magics(cell.source, found)
        if found.directive is None:
            found.parts = parts_of(TransformerManager().transform_cell(rest))
    except UsageError as error:
        found.trouble = str(error)
    except HelpShown:
        found.trouble = "it shows help"
    except (SyntaxError, ValueError) as error:
        line = f", line {error.lineno}" if isinstance(error, SyntaxError) else ""
        found.trouble = f"it is not Python ({getattr(error, 'msg', error)}{line})"
    return found


def _without_magics(source: str, found: SortedCell) -> str:
    """Return a cell's source without the cell magics at its top, which are noted in what is found.

    Raises:
        UsageError: One of them can't be followed.
        HelpShown: It asks for help.
    """
    while True:
        lines = source.splitlines(keepends=True)
        first = first_code(lines)
        magic = None if first is None else _CELL_MAGIC.match(lines[first])
        if magic is None or first is None:
            return source
        source = "".join(lines[:first] + lines[first + 1 :])
        name, line = magic[1], magic[2].strip()
        if name in ("distributed", "dist"):
            found.on_ranks, found.flags = True, _flags(line)
        elif name == "rank":
            ranks, *flags = re.split(r"\s+(?=-\D)", without_comment(line).strip(), maxsplit=1)
            found.on_ranks, found.flags = True, _flags(" ".join([f"-r '{ranks}'", *flags]))
        elif name == "local":
            found.on_ranks = False
        elif name in ("memory", "time", "capture"):
            found.ignored.append(f"%%{name}")
        elif name in _AS_CODE:
            found.directive = Directive("cell", name, line, source)
            return source
        else:
            raise UsageError(f"%%{name} has no counterpart in a script")


def _flags(line: str) -> argparse.Namespace:
    flags = cell_parser().read(line)
    if flags.ranks is not None and not _RANKS.fullmatch(str(flags.ranks).strip()):
        raise UsageError(f"`-r {flags.ranks}` is known only when the notebook runs: write numbers")
    return flags
