"""A session of more or fewer ranks: those that have died are given up, or others are added."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from nbdist.base.checks import check_whole
from nbdist.base.ranks import describe_ranks
from nbdist.base.text import counted
from nbdist.client.healing.heal import ALREADY, HealReport, bring_in, describe_moves, refuse_busy, request
from nbdist.client.ranks.rank_set import Ranks, RankSet
from nbdist.client.start.starting import StartLine, removed_afterwards
from nbdist.errors import UsageError
from nbdist.wire.messages.healing import Grow, Healed, Shrink


@dataclass(frozen=True)
class ShrinkReport:
    """What a shrink has done. It prints as a few lines.

    Attributes:
        gone: The ranks that were given up, by the numbers that they had.
        numbers: The numbers of the others now, by those that they had.
        groups: How many process groups were rebuilt.
        generation: Of the process groups.
        seconds: What it took.
        notes: What else there is to know.
    """

    gone: list[int]
    numbers: dict[int, int]
    groups: int
    generation: int
    seconds: float
    notes: str = ""

    def __str__(self) -> str:
        rebuilt = f"{counted(self.groups, 'process group')} rebuilt (generation {self.generation})"
        left = counted(len(self.numbers), "rank")
        lines = [f"{describe_ranks(self.gone)} removed in {self.seconds:.2f} s: {left} left, {rebuilt}"]
        lines += describe_moves(self.numbers)
        if self.notes:
            lines.append(self.notes)
        lines.append("the remaining ranks keep their variables")
        return "\n".join(lines)


def shrink(rank_set: RankSet, ranks: Ranks) -> ShrinkReport:
    """Go on without some ranks.

    Args:
        rank_set: The ranks.
        ranks: Which, beside those that have died; None: only those.

    Raises:
        UsageError: There is nothing to give up, or nothing would be left; nothing has changed.
        SessionBusy: Ranks run something.
        SessionBroken: It failed.
    """
    rank_set.check_open()
    dead = sorted(rank_set.traffic.dead)
    if ranks is None and not dead:
        raise UsageError(
            "no rank has died. To remove living ranks, say which: `%distributed shrink -r 1`; their variables are lost"
        )
    gone = sorted({*dead, *(rank_set.choose(ranks, living=False) if ranks is not None else ())})
    staying = [info.rank for info in rank_set.ranks if info.rank not in gone]
    if not staying:
        raise UsageError(
            "no rank would be left. `%distributed restart` starts fresh ranks, `%distributed stop` ends them"
        )
    busy = {rank: task for rank, task in rank_set.traffic.running(staying).items() if not task.bereaved}
    if busy:
        raise rank_set.busy(busy)
    failed = f"{describe_ranks(gone)} {'was' if len(gone) == 1 else 'were'} not removed"
    with rank_set.talk.dialogue(ALREADY) as ask, rank_set.traffic.replacing(gone):
        began = time.monotonic()
        healed = request(rank_set, ask, Shrink(gone), Healed, failed)
        seconds = time.monotonic() - began
    rank_set.traffic.generation = healed.generation
    numbers = {before: now for now, before in enumerate(staying)}
    return ShrinkReport(gone, numbers, healed.groups, healed.generation, seconds, healed.text)


def grow(
    rank_set: RankSet,
    count: int,
    ranks: Ranks,
    gpus: Callable[[int], list[str] | None],
    catch_up: Callable[[Sequence[int]], None],
    *,
    machines: int = 0,
    progress: Callable[[StartLine], None] = lambda line: None,
    token_file: str = "",
) -> HealReport:
    """Add ranks on the machines of a session.

    Args:
        rank_set: The ranks.
        count: How many on each machine.
        ranks: On the machines of these; None: on all.
        gpus: Returns the GPUs that so many ranks get at a start.
        catch_up: Called with the newcomers before they run any cell.
        machines: Add them on so many other machines instead, which are waited for.
        progress: Called with lines of text while these are waited for.
        token_file: Where their tokens are written; "": they are part of a line.

    Raises:
        UsageError: They can't be added; nothing has changed.
        SessionBusy: Ranks run something.
        SessionBroken: It failed; the others are as they were.
        RankError: They were added; then a cell that they ran to be set up failed.
    """
    rank_set.check_open()
    check_whole("the number of ranks to add", count, 1, "%distributed grow -n 1")
    if dead := sorted(rank_set.traffic.dead):
        verb = "has" if len(dead) == 1 else "have"
        raise UsageError(
            f"{describe_ranks(dead)} {verb} died: `%distributed heal` replaces dead ranks, `%distributed shrink` "
            "removes them; then type `%distributed grow` again"
        )
    nodes = [] if ranks is None else _nodes_of(rank_set, ranks)
    refuse_busy(rank_set, [])
    found = None if machines or (nodes and 0 not in nodes) else _own_gpus(rank_set, count, gpus)
    everyone = range(sys.maxsize)  # the error says who has ended
    with (
        removed_afterwards(token_file if machines else ""),
        rank_set.talk.dialogue(ALREADY, progress, token_file) as ask,
        rank_set.traffic.replacing(everyone),
    ):
        return bring_in(rank_set, ask, Grow(count, found, nodes, machines), catch_up, "added")


def _nodes_of(rank_set: RankSet, ranks: Ranks) -> list[int]:
    """Return the machines of these ranks."""
    chosen = rank_set.choose(ranks)
    return sorted({info.node for info in rank_set.ranks if info.rank in chosen})


def _own_gpus(rank_set: RankSet, count: int, gpus: Callable[[int], list[str] | None]) -> list[str] | None:
    """Return the GPUs of this machine for its ranks and so many more."""
    here = sum(info.node == 0 for info in rank_set.ranks)
    if not here and rank_set.ranks:  # a machine that only has the notebook
        return None
    total = here + count
    found = gpus(total)
    if "nccl" in rank_set.backend and total > len(found or []):
        free = len(found or []) - here
        way_out = f"`%distributed grow -n {free}`" if free > 0 else "each has a rank already"
        raise UsageError(
            f"{counted(total, 'rank')} for {counted(len(found or []), 'GPU')}, and this session's process group uses "
            f"nccl, which needs a GPU for each rank: {way_out}"
        )
    return found
