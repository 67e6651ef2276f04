"""What every rank is, has and does: `Session.status`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nbdist.client.session.rank_set import RankSet
from nbdist.client.session.task import Task

_LIMIT = 1.0  # seconds that ranks have to answer


def status_of(rank_set: RankSet) -> list[dict[str, Any]]:
    """A row for each rank; the columns are those of `Session.status`."""
    rank_set.check_open()
    traffic, living = rank_set.traffic, rank_set.living()
    known = traffic.ask_controller("status")["ranks"]
    memory = traffic.ask(living, "memory", timeout=_LIMIT)
    stacks = traffic.ask(living, "stack", timeout=_LIMIT)
    running = traffic.running(living)
    return [_row(row, rank_set.generation, memory, stacks, running) for row in known]


def _row(
    row: dict[str, Any],
    generation: int,
    memory: Mapping[int, dict[str, Any]],
    stacks: Mapping[int, dict[str, Any]],
    busy: Mapping[int, Task],
) -> dict[str, Any]:
    rank = row["rank"]
    state = "dead" if row["dead"] else "busy" if row["serial"] else "idle"
    doing = row["dead"]
    if state == "busy":
        task = busy.get(rank)
        doing = stacks.get(rank, {}).get("line") or (task.describe() if task is not None else "")
    return {
        "rank": rank,
        "pid": row["pid"],
        "device": row["device"],
        "state": state,
        "generation": generation,
        "memory": memory.get(rank, {}).get("private"),
        "device_memory": memory.get(rank, {}).get("reserved"),
        "doing": doing,
    }
