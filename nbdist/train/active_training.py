"""Whether this process has prepared anything for training, and which plan it follows, without loading torch.

`nbdist.train.state` fills in `training` when it is imported; before, there is nothing to do. Imports nothing heavy.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from nbdist.planning.variables import NAMES


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


def follow(environment: Mapping[str, str]) -> None:
    """Have what is prepared from now on follow the plan in these variables. What is prepared already keeps its own.

    Args:
        environment: NBDIST_PLAN, and what `Plan.environment` gives; variables of an earlier plan are removed.
    """
    for name in NAMES:
        os.environ.pop(name, None)
    os.environ.update(environment)
    _let_accelerate_read_again()
    if training is not None and not training.is_begun():
        training.follow_plan()


def _let_accelerate_read_again() -> None:
    """Have the next `Accelerator()` read the plan's variables: the first one of a process does it for all later ones.

    Those that exist keep the state that they share, and so does what they have prepared.
    """
    kind: Any = getattr(sys.modules.get("accelerate.accelerator"), "Accelerator", None)
    if kind is None or hasattr(kind.__init__, "_nbdist_reads_again"):
        return
    make = kind.__init__

    @functools.wraps(make)
    def __init__(self: Any, *args: Any, **options: Any) -> None:
        kind.__init__ = make
        for name in ("AcceleratorState", "PartialState"):
            state: Any = getattr(sys.modules.get("accelerate.state"), name, None)
            if type(getattr(state, "_shared_state", None)) is dict:  # on TPUs it is something else
                state._shared_state = {}
        make(self, *args, **options)

    __init__._nbdist_reads_again = True  # type: ignore[attr-defined]
    kind.__init__ = __init__
