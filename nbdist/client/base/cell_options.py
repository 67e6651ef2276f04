"""How a cell runs on ranks, and what happens to its output."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class CellOptions:
    """The options that are the same on all ranks of a cell.

    Attributes:
        number: The cell's number in the notebook; 0 for the running cell's.
        offset: Lines of the notebook's cell above the code.
        grace: Seconds that ranks may wait in a collective for one that raised; then they are freed.
        show: Whether output is shown in the notebook.
        keep: Whether output is kept in the task's result.
        profile: The folder for the ranks' traces; empty for no profile.
        setup: Whether ranks that replace dead ones run it first.
        file: What debuggers know the cell's code by; empty while none is on.
    """

    number: int = 0
    offset: int = 0
    grace: float = 1.0
    show: bool = False
    keep: bool = False
    profile: str = ""
    setup: bool = False
    file: str = ""
