"""Routes cells: `auto on` adds a magic on top of them; `%%local` and `%%memory` are removed.

Owns changes to a cell's text before IPython reads it. Independent of sessions.
"""

from __future__ import annotations

import re
from typing import Any

from IPython.core.interactiveshell import InteractiveShell

from nbdist import shells
from nbdist.client.costs.cell_memory import first_code, strip_line, strip_mark
from nbdist.client.magic_lines.magic_line import without_comment

_AUTO_LINE = "%%distributed --auto\n"
# With `auto on` these run in the notebook: our own magics, and what changes the environment that all ranks share.
# labextension/src/lab/cell_line.ts has the same.
STAYS_HERE = re.compile(
    r"%%?(distributed|dist|rank|local|memory|pip|conda|mamba|micromamba|uv|(re)?load_ext\s+nbdist)\b"
)
# They run the rest of the cell as a cell, so that one of the above may follow.
AROUND = re.compile(r"%%(memory|time|timeit|capture|prun)\b")
# IPython knows a cell magic by the first line only, but people write `# train` above it.
_BELOW_COMMENTS = re.compile(r"%%(distributed|dist|rank|local|memory)\b")
_LEAVES = re.compile(r"(exit|quit)(\(\))?")


class CellRouter:
    """Sees every cell before IPython does.

    Args:
        shell: The notebook's shell.

    Attributes:
        auto: Whether cells run on all ranks.
    """

    def __init__(self, shell: InteractiveShell) -> None:
        self.auto = False
        self._shell = shell
        self._running = 0  # nested cells

    def install(self) -> None:
        """See every cell from now on."""
        self._shell.input_transformers_cleanup.append(self._route)
        manager: Any = self._shell.input_transformer_manager
        is_complete = manager.check_complete

        def check_complete(cell: str) -> Any:
            """Keep a terminal from waiting for the blank line that ends a cell magic (with `auto on`)."""
            self._enter_cell()
            try:
                return is_complete(cell)
            finally:
                self._leave_cell()

        manager.check_complete = check_complete
        self._shell.events.register("pre_execute", self._enter_cell)
        self._shell.events.register("post_execute", self._leave_cell)

    def _enter_cell(self) -> None:
        self._running += 1

    def _leave_cell(self) -> None:
        self._running = max(0, self._running - 1)

    def _route(self, lines: list[str]) -> list[str]:
        """Remove `%%memory` and `%%local`, and with `auto on` put a magic on top of other cells; an input transformer.

        What a running cell asks IPython to transform (`%time expression`, `%run`) is left as it is.
        """
        lines = _with_magic_first(lines)
        lines = lines if self._running else _with_magic_first(strip_mark(lines))
        first = next((at for at, line in enumerate(lines) if line.strip()), None)
        if self._running or first is None:
            return lines
        if without_comment(lines[first]).strip() == "%%local":
            return strip_line(lines, first)
        code = (line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#"))
        line = next((line for line in code if not AROUND.match(line)), "%dist")
        leaves = _LEAVES.fullmatch(line) and not hasattr(self._shell, "kernel")  # a terminal
        if not self.auto or leaves or STAYS_HERE.match(line) or not shells.in_cell():
            return lines
        return [_AUTO_LINE, *lines]


def _with_magic_first(lines: list[str]) -> list[str]:
    """Return a cell's lines with our magic above the comments that it stands below; code keeps its line numbers."""
    code = first_code(lines)
    if code is None or not any(line.strip() for line in lines[:code]) or not _BELOW_COMMENTS.match(lines[code]):
        return lines
    return [lines[code], *lines[:code], *lines[code + 1 :]]
