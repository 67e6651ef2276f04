"""The frame in JupyterLab's call stack that stands for all stopped ranks: while it is selected, they go on together.

Knows what the page is shown of it; `breakpoints` has the ranks go on.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from nbdist.base.ranks import format_ranks
from nbdist.client.debugger.adapter import DapMessage

_FRAMES = 2**28  # where its numbers begin: no rank's, and none of debugpy's own
_ONE = "select the frame of one rank for this"
_Place = tuple[int, DapMessage]  # a rank and its innermost frame


class AllStopped:
    """It.

    Attributes:
        chosen: Whether it is selected.
    """

    def __init__(self) -> None:
        self.chosen = False
        self._numbers = itertools.count(_FRAMES)
        self._number = 0
        self._places: list[_Place] = []

    def added(self, frames: list[DapMessage], places: Sequence[_Place]) -> list[DapMessage]:
        """Return the frames of stopped ranks with this one: the first while selected, else the last.

        Args:
            frames: Those of the ranks, the current one's first.
            places: The stopped ranks.
        """
        before, self._places = self._places, sorted(places, key=lambda place: place[0])
        if not frames or (len(places) < 2 and not self.chosen):
            return frames
        if not self._number or (self.chosen and self._places != before):
            self._number = next(self._numbers)  # a new one, so that the page looks at it again
        name = f"all stopped ranks: {format_ranks(rank for rank, _ in self._places)}"
        own = {**frames[0], "id": self._number, "name": name}
        return [own, *frames] if self.chosen else [*frames, own]

    def is_meant(self, arguments: DapMessage) -> bool:
        """Return whether a request is for this frame."""
        numbers = (arguments.get("frameId"), arguments.get("variablesReference"))
        return any(isinstance(number, int) and _FRAMES <= number <= self._number for number in numbers)

    def answer(self, command: str) -> DapMessage:
        """Return the answer to a request that is: as its variables it has where each rank is stopped."""
        if command == "scopes":
            self.chosen = True
            scope = {"name": "Stopped ranks", "variablesReference": self._number, "expensive": False}
            return {"success": True, "body": {"scopes": [scope]}}
        if command != "variables":
            return {"success": False, "message": _ONE}
        return {"success": True, "body": {"variables": [_variable(rank, frame) for rank, frame in self._places]}}


def _variable(rank: int, frame: DapMessage) -> DapMessage:
    where = f"{frame['name']}, line {frame['line']}"  # without a type, which JupyterLab would show in its place
    return {"name": f"rank {rank}", "value": where, "variablesReference": 0}
