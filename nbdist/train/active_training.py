"""Whether this process has prepared anything for training, for those who must not load torch to ask.

`nbdist.train.state` fills in `training` when it is imported; before, there is nothing to do. Imports nothing heavy.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Training:
    """What others ask of the state of this process's training: functions of `nbdist.train.state`."""

    after_cell: Callable[[], None]
    abandon_window: Callable[[], None]
    is_begun: Callable[[], bool]
    replace: Callable[[Any], Any]
    follow_plan: Callable[[], None]
    resized: Callable[[], list[str]]


training: Training | None = None
newcomer = False  # whether this process has replaced a rank that died, and neither got a state nor trained since
