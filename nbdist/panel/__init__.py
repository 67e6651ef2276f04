"""The panel: memory, speed and health of every rank, in view while they work.

model.py     what a Sample means to a reader: rows, nodes, figures, warnings
updates.py   what the page has been told, and the little that it has to be told next
fallback.py  the same without JavaScript: text, and HTML that stays in the saved notebook
plot.py      memory and TFLOPS over time, by matplotlib
panel_feed.py  what one page is told, and what its reader asks
panel.py     the widget that brings these to a notebook
static/      built from labextension/, and committed
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nbdist.panel.panel import Panel as Panel

__all__ = ["Panel"]


def __getattr__(name: str) -> Any:
    if name != "Panel":
        raise AttributeError(f"module 'nbdist.panel' has no attribute {name!r}")
    return importlib.import_module("nbdist.panel.panel").Panel
