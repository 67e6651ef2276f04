"""The line below a cell that shows what a launch over several nodes waits for."""

from __future__ import annotations

import time

from nbdist import shells
from nbdist.client.output.publisher import Publisher
from nbdist.client.output.screen import Screen
from nbdist.launch.nodes.node_agents import Nodes, Waiting

_WORTH_SAYING = 2.0  # seconds of waiting
_REMARK_EVERY = 0.5  # seconds, where a line can be replaced
_LINE_EVERY = 30.0  # where it can't
_AT_WORK = 5.0  # seconds that ranks on other nodes may still run before this is reported


class WaitingLine:
    """The line below the cell that shows what is being waited for. For the cell's thread."""

    def __init__(self, nodes: Nodes) -> None:
        self._nodes = nodes
        self._screen = Screen([], Publisher(shells.cell_number()), f"nodes-{id(self):x}")
        self._shown: Waiting | None = None
        self._line_due = 0.0

    def show(self) -> float:
        """Update the line. Returns the seconds until the next update."""
        waiting, now = self._nodes.waiting, time.monotonic()
        if waiting is None or now < waiting.since + (_WORTH_SAYING if waiting.limit is not None else _AT_WORK):
            return _REMARK_EVERY
        same, self._shown = self._shown is not None and now < self._line_due, waiting
        if not same:
            self._line_due = now + _LINE_EVERY
        limit = f" of {waiting.limit:g} s" if waiting.limit is not None else ""
        self._screen.remark(f"waiting for {waiting.text} ({now - waiting.since:.0f} s{limit})", "nodes", same=same)
        return _REMARK_EVERY

    def end(self) -> None:
        """End the line: the wait is over."""
        if (shown := self._shown) is not None:
            seconds = time.monotonic() - shown.since
            self._screen.remark(f"waited {seconds:.0f} s for {shown.text}", "nodes", same=True)
        self._shown = None
