"""How ranks come together for what all of them must do: nobody hangs because another rank did not come.

Coming goes through the store, which can wait with a bound and names who is missing; a collective can do neither. Works
without a process group too: one rank always meets itself.
"""

from __future__ import annotations

import os
import sys
import time
import warnings
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from nbdist.base.ranks import describe_ranks
from nbdist.errors import UsageError
from nbdist.train.collective.agreement import gather, refuse_differing, refuse_other_calls
from nbdist.train.collective.participants import has_no_limit, is_alone, refuse_partial
from nbdist.train.state import rank, world_size

REPORT_AFTER = 30.0  # seconds of waiting
_ROUND = "nbdist/meeting"
_POLL = (0.002, 0.05)  # seconds between looks at the store, first and last


def meet(function: str, arguments: Mapping[str, Any], limit: float | None = None) -> None:
    """Wait until all ranks have called this function, with the same arguments.

    Args:
        function: Its name.
        arguments: What must be the same on all ranks.
        limit: Seconds to wait for the others; None: NBDIST_SAVE_LIMIT, else as long as a collective may take. Who is
            missing is said after 30 s.

    Raises:
        UsageError: Some ranks have not come, or can't; or they have called something else. No rank has done anything.
    """
    limit = limit_of(function, limit)
    if world_size() == 1 or is_alone():
        return
    refuse_partial(function, world_size())
    store = _store()
    if store is not None:
        _come(store, function, limit)
    told = gather((function, dict(arguments)))
    refuse_other_calls([name for name, _ in told])
    for key in arguments:
        refuse_differing(function, [f"{key}={given[key]!r}" for _, given in told])


def limit_of(function: str, limit: float | None) -> float:
    """Return the seconds that ranks wait for each other: those given, else the environment's, else a collective's.

    Raises:
        UsageError: What was given is not a number of seconds.
    """
    given = os.environ.get("NBDIST_SAVE_LIMIT") if limit is None else limit
    if given is None:
        return _collective_limit()
    try:
        seconds = float(given)
    except (TypeError, ValueError):
        seconds = -1.0
    if not seconds > 0:
        where = "NBDIST_SAVE_LIMIT" if limit is None else f"limit of {function}"
        raise UsageError(f"{where} is {given!r}: give a number of seconds, such as 60")
    return seconds


def _collective_limit() -> float:
    """Return the seconds after which torch gives up on a collective of all ranks."""
    limit = c10d.default_pg_timeout
    with suppress(AttributeError, RuntimeError):  # another torch, or no group
        group: Any = dist.group.WORLD
        limit = group._get_backend(group._device_types[0]).options._timeout
    return float(limit.total_seconds())


def _store() -> Any:
    """Return the store that the ranks met through, if this torch lets us have it."""
    # A rank that has replaced another has its group's first store for itself.
    get = getattr(c10d, "_get_default_store", None) or getattr(dist.group.WORLD, "get_group_store", None)
    if get is None:
        warnings.warn(
            "this version of torch gives no access to its store: a call on only some ranks will hang", stacklevel=4
        )
        return None
    return get()


def _come(store: Any, function: str, limit: float) -> None:
    """Be there, and wait for the others; all ranks that are there hear the same verdict.

    A round ends with one verdict, set by whoever comes last or has waited too long; who comes later begins the next
    round. So a rank that was alone, or was interrupted, is not taken for present afterwards.
    """
    patience = _Patience(function, limit)
    absent = {rank()}
    while rank() in absent:  # also if the others gave up in the moment in which this rank came
        absent = _attend(store, patience)
    if not absent:
        return
    present = [other for other in range(world_size()) if other not in absent]
    raise UsageError(
        f"{function} was called on {describe_ranks(present)} only ({describe_ranks(sorted(absent))} "
        f"{'has' if len(absent) == 1 else 'have'} not arrived within {limit:g} s): call it on all ranks, not under "
        "`if is_main_process()`; if they only take longer, give more seconds with limit="
    )


class _Patience:
    """How long to wait for the others, and when to report who is missing."""

    def __init__(self, function: str, limit: float) -> None:
        self._function, self._limit = function, limit
        self._began = time.monotonic()
        self._reported = False

    @property
    def is_over(self) -> bool:
        return not has_no_limit() and time.monotonic() > self._began + self._limit

    @property
    def is_worth_a_report(self) -> bool:
        """Whether it is time to call `report`, which has not been done yet."""
        return not self._reported and time.monotonic() > self._began + REPORT_AFTER

    def report(self, absent: set[int]) -> None:
        """Name the ranks that are missing, on the first of those that wait for them."""
        self._reported = True
        if rank() == min(set(range(world_size())) - absent, default=-1):
            print(
                f"nbdist: {self._function} has waited {REPORT_AFTER:g} s for {describe_ranks(sorted(absent))} and "
                f"gives up after {self._limit:g} s",
                file=sys.stderr,
                flush=True,
            )


def _attend(store: Any, patience: _Patience) -> set[int]:
    """Return one round: the ranks that were not there when it ended."""
    number = _wait_for_round(store)
    verdict = f"{_ROUND}/{number}/verdict"
    store.set(f"{_ROUND}/{number}/{rank()}", "here")
    try:
        if store.add(f"{_ROUND}/{number}/count", 1) == world_size():
            return _end_round(store, number, set())
        pause = _POLL[0]
        while not store.check([verdict]):
            if patience.is_over:
                return _end_round(store, number, _missing(store, number))
            if patience.is_worth_a_report:
                patience.report(_missing(store, number))
            time.sleep(pause)
            pause = min(2 * pause, _POLL[1])
        return _read(store.get(verdict))
    except BaseException:  # Ctrl-C included: the others must not wait for this rank
        _end_round(store, number, _missing(store, number) | {rank()})
        raise


def _wait_for_round(store: Any) -> int:
    """Return the number of the round that has no verdict yet. Who sets a verdict begins the next round at once."""
    while True:
        number = int(store.add(_ROUND, 0))
        if not store.check([f"{_ROUND}/{number}/verdict"]):
            return number
        time.sleep(_POLL[0])


def _end_round(store: Any, number: int, absent: set[int]) -> set[int]:
    """Set the verdict if nobody has; which one counts is what this returns."""
    mine = ",".join(map(str, sorted(absent))) or "none"
    own = f"{mine} (rank {rank()})"
    verdict = store.compare_set(f"{_ROUND}/{number}/verdict", "", own)
    if verdict.decode() == own:
        store.add(_ROUND, 1)
    return _read(verdict)


def _read(verdict: bytes) -> set[int]:
    absent = verdict.decode().split(" ")[0]
    return set() if absent == "none" else {int(text) for text in absent.split(",")}


def _missing(store: Any, number: int) -> set[int]:
    return {other for other in range(world_size()) if not store.check([f"{_ROUND}/{number}/{other}"])}
