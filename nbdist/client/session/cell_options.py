"""How a cell runs on ranks, and what becomes of its output."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class CellOptions:
    """What is the same on all ranks of a cell.

    Attributes:
        number: The cell's in the notebook; 0: that of the one that is running.
        offset: Lines of the notebook's cell above the code.
        grace: Seconds that ranks may wait in a collective for one that has raised; then they are freed.
        show: Whether output goes to the notebook.
        keep: Whether output is kept in the task's result.
        profile: The folder for the ranks' traces; empty: they are not profiled.
    """

    number: int = 0
    offset: int = 0
    grace: float = 1.0
    show: bool = False
    keep: bool = False
    profile: str = ""
