"""Whether a main thread that is in a call into C waits or computes."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from nbdist.worker.recovery.position import PositionProbe
from testbed.kernel import wait_until
from tests.stand_ins.spinning import spin, spinning_until


def seen_from_aside(look: Callable[[], bool]) -> bool:
    """What another thread finds while this one, the main thread, spins in a call into C."""
    found: list[bool] = []
    spin(spinning_until(lambda: found.append(look())))
    return found[0]


def _main_thread_rests() -> bool:
    frame = sys._current_frames()[threading.main_thread().ident or 0]
    before = frame.f_lasti
    time.sleep(0.01)
    return frame.f_lasti == before


def stands_still(before: Any, after: Any) -> bool:
    """Whether it seems to wait, if torch's record shows this at the mark and that later on."""
    records = iter([before, after])
    collectives: Any = SimpleNamespace(record=SimpleNamespace(unfinished=lambda: next(records)))
    gate: Any = SimpleNamespace(running=1)
    keyboard: Any = SimpleNamespace(asking=False)
    progress = PositionProbe(collectives, gate, keyboard)

    def look() -> bool:
        wait_until(_main_thread_rests, "the main thread to be in the call")
        progress.mark()
        time.sleep(0.1)  # during which it spins
        return progress.stands_still()

    return seen_from_aside(look)


@pytest.mark.parametrize(
    ("before", "after", "waits"),
    [
        pytest.param({"0": (3, 2)}, {"0": (3, 2)}, True, id="a collective is under way all the time"),
        pytest.param({"0": (3, 2)}, {"0": (4, 3)}, False, id="collectives come to an end"),
        pytest.param({"0": (3, 2)}, {}, False, id="the last one has ended"),
        pytest.param({}, {}, False, id="none is under way"),
        pytest.param(None, None, False, id="torch keeps no record"),
    ],
)
def test_a_call_that_uses_a_processor_waits_only_if_a_collective_does_not_end(
    before: Any, after: Any, waits: bool
) -> None:
    assert stands_still(before, after) is waits
