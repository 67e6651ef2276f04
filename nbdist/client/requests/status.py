"""Each rank's state and location: `Session.status` and `Session.stacks`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nbdist.base import limits
from nbdist.client.base.rank_memory import memory_of
from nbdist.client.ranks.rank_set import Ranks, RankSet
from nbdist.client.ranks.task import Task
from nbdist.client.reports.flight import COUNT, render
from nbdist.client.reports.stack_report import Stack, line_of, stack_of, with_native_frames
from nbdist.errors import UsageError
from nbdist.wire.questions.knowing import ProcessMemory
from nbdist.wire.questions.question import NoAnswer
from nbdist.wire.questions.questions import RankStatus
from nbdist.wire.questions.stopping import Flight, GetFlight, GetNativeStack, GetStack, ThreadStack

_FLIGHT_LIMIT = 5.0  # seconds
_SPARE = 3  # times as many collectives are read: ranks that are ahead of others would have no common ones
_NATIVE_LIMIT = 90.0  # seconds: an agent gives up a rank after 60


def look_at_stacks(rank_set: RankSet, ranks: Ranks = None, *, native: bool = False) -> dict[int, Stack]:
    """Return where ranks are; the arguments are those of `Session.stacks`."""
    chosen = rank_set.choose(rank_set.living() if ranks is None else ranks)
    answers = rank_set.traffic.ask(chosen, GetStack(), timeout=limits.STATUS_ANSWER)
    cells = {rank: task.describe() for rank, task in rank_set.traffic.running(chosen).items()}
    found = {rank: stack_of(answers.get(rank), cells.get(rank, "")) for rank in chosen}
    if native:
        busy = [rank for rank, stack in found.items() if stack.busy]
        seen = rank_set.traffic.ask(busy, GetNativeStack(), timeout=_NATIVE_LIMIT)
        found = with_native_frames(found, seen, rank_set.traffic.places)
    return found


def look_at_flight(rank_set: RankSet, ranks: Ranks = None, count: int = COUNT) -> str:
    """Return the last collectives of ranks; the arguments are those of `Session.flight`."""
    chosen = rank_set.choose(rank_set.living() if ranks is None else ranks)
    answers = rank_set.traffic.ask(chosen, GetFlight(_SPARE * count), timeout=_FLIGHT_LIMIT)
    found = {rank: answer for rank, answer in answers.items() if isinstance(answer, Flight)}
    if not any(flight.recorded for flight in found.values()):
        raise UsageError(
            "PyTorch has not recorded any collectives on these ranks: either none has run yet, or its flight "
            "recorder is off. Setting TORCH_FR_BUFFER_SIZE=0 turns it off, and PyTorch 2.8 doesn't record gloo"
        )
    return render(found, count, rank_set.traffic.places)


def status_of(rank_set: RankSet, *, memory: bool = True) -> list[dict[str, Any]]:
    """Return a row for each rank; the columns are those of `Session.status`. `memory`: whether ranks measure theirs."""
    rank_set.check_open()
    traffic, living = rank_set.traffic, rank_set.living()
    known = traffic.status()
    held = memory_of(traffic, living) if memory else {}
    stacks = traffic.ask(living, GetStack(), timeout=limits.STATUS_ANSWER)
    running = traffic.running(living)
    places = {info.rank: info.host for info in rank_set.ranks}
    return [_row(row, places[row.rank], rank_set.generation, held, stacks, running) for row in known.ranks]


def _row(
    row: RankStatus,
    node: str,
    generation: int,
    memory: Mapping[int, ProcessMemory],
    stacks: Mapping[int, ThreadStack | NoAnswer],
    busy: Mapping[int, Task],
) -> dict[str, Any]:
    rank, held = row.rank, memory.get(row.rank)
    state = "dead" if row.dead else "busy" if row.serial else "idle"
    doing = row.dead
    if state == "busy":
        task = busy.get(rank)
        doing = line_of(stacks.get(rank)) or (task.describe() if task is not None else "")
    return {
        "rank": rank,
        "node": node,
        "pid": row.pid,
        "device": row.device,
        "state": state,
        "generation": generation,
        "memory": held.private if held is not None else None,
        "device_memory": held.on_gpu if held is not None else None,
        "device_memory_by": _who_reports(held),
        "doing": doing,
    }


def _who_reports(held: ProcessMemory | None) -> str:
    if held is None or held.on_gpu is None:
        return ""
    return "driver" if held.reserved is None else "torch"
