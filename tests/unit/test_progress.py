"""Whether a main thread that is in a call into C waits or computes."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest

from nbdist.base import limits
from nbdist.worker.recovery.position import PositionProbe
from testbed.kernel import wait_until
from tests.stand_ins.spinning import spin, spinning_until


def seen_from_aside(look: Callable[[], list[bool]], *, rest: bool) -> list[bool]:
    """What another thread finds while this one, the main thread, spins or rests in a call into C."""
    if rest:
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(look).result()
    found: list[list[bool]] = []
    spin(spinning_until(lambda: found.append(look())))
    return found[0]


def _main_thread_rests() -> bool:
    frame = sys._current_frames()[threading.main_thread().ident or 0]
    before = frame.f_lasti
    time.sleep(0.01)
    return frame.f_lasti == before


def stands_still(*shown: Any, pause: float = 0.15, resent: bool = False, rest: bool = False) -> list[bool]:
    """Whether it seems to wait, if torch's record shows this at the mark and that later on, look by look.

    Args:
        shown: What it shows.
        pause: Seconds between looks, during which the main thread spins.
        resent: Whether the interrupt is sent again in between.
        rest: Whether the main thread rests instead of spinning.
    """
    records = iter(shown)
    collectives: Any = SimpleNamespace(record=SimpleNamespace(unfinished=lambda: next(records)))
    gate: Any = SimpleNamespace(running=1)
    keyboard: Any = SimpleNamespace(asking=False)
    progress = PositionProbe(collectives, gate, keyboard)

    def look() -> list[bool]:
        wait_until(_main_thread_rests, "the main thread to be in the call")
        progress.mark()
        if resent:
            time.sleep(pause)
            progress.note_moves()
        found = []
        for _ in shown[2 if resent else 1 :]:
            time.sleep(pause)
            found.append(progress.stands_still())
        return found

    return seen_from_aside(look, rest=rest)


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
    assert stands_still(before, after) == [waits]


# torch's record as NCCL's watchdog writes it, which looks every 0.1 s: the end of the second collective is noted late.
LATE, NOTED = {"0": (3, 1)}, {"0": (3, 2)}


def test_that_torch_notes_the_end_of_an_earlier_collective_late_counts_for_one_look_only() -> None:
    assert stands_still(LATE, NOTED, NOTED) == [False, True]
    assert stands_still(LATE, NOTED, {"0": (3, 3)}) == [False, False]


def test_and_for_none_once_the_interrupt_was_sent_again() -> None:
    assert stands_still(LATE, NOTED, NOTED, resent=True) == [True]


def test_one_that_has_moved_a_moment_ago_does_not_wait_yet() -> None:
    pause = limits.PROOF / 8  # at most two of them, and what looking takes
    assert stands_still(LATE, NOTED, NOTED, pause=pause) == [False, False]


def test_looks_closer_to_each_other_than_the_record_is_late_prove_nothing() -> None:
    """The rank answered late, and two questions at once; what it seems to wait in may have ended before both."""
    assert stands_still({"0": (3, 2)}, {"0": (3, 2)}, pause=limits.PROOF / 8) == [False]


def test_nor_do_those_within_which_the_kernel_may_not_have_counted_processor_time_yet() -> None:
    assert stands_still(None, None, None, pause=0.0, rest=True) == [False, False]
    assert stands_still(None, None, rest=True) == [True]
