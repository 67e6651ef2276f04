"""Replaces dead ranks of a session, and has the newcomers run what they lack of the cells before."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import TypeVar

from nbdist.base.ranks import describe_ranks, format_ranks
from nbdist.base.text import counted
from nbdist.client.base import interruption
from nbdist.client.base.cell_options import CellOptions
from nbdist.client.healing.setup_cells import definitions
from nbdist.client.ranks.rank_set import Ranks, RankSet
from nbdist.client.start.controller_talk import Request
from nbdist.client.start.starting import StartLine, removed_afterwards
from nbdist.errors import RankError, SessionBroken, UsageError
from nbdist.wire.base.message import Message
from nbdist.wire.messages.healing import GiveUpHeal, Grow, Heal, Healed, HealFailed, JoinGroups, Replaced, SetupCell

M = TypeVar("M", bound=Message)
ALREADY = "ranks are already being replaced, added, or removed: wait until that is done"


@dataclass(frozen=True)
class HealReport:
    """What a heal has done. It prints as a few lines.

    Attributes:
        ranks: The ranks that were replaced; none if none had died.
        groups: How many process groups were rebuilt.
        generation: Of the process groups.
        seconds: What the replacement took, without the cells.
        cells: Numbers of the cells that the newcomers ran.
        marked: Whether those were marked as setup cells, and so ran whole.
        notes: What else there is to know.
        what: What became of these ranks: "replaced", or "added".
        numbers: If ranks were added, the numbers of the others now, by those that they had.
    """

    ranks: list[int]
    groups: int
    generation: int
    seconds: float
    cells: list[int]
    marked: bool
    notes: str = ""
    what: str = "replaced"
    numbers: Mapping[int, int] = field(default_factory=dict)

    def __str__(self) -> str:
        if not self.ranks:
            return (
                "no rank has died, so none was replaced. If one is stuck, use `%distributed interrupt` or, "
                "for example, `%distributed heal -r 1 --kill`"
            )
        one = len(self.ranks) == 1
        rebuilt = f"{counted(self.groups, 'process group')} rebuilt (generation {self.generation})"
        if not self.groups:
            rebuilt = "no process group to join"
        lines = [f"{describe_ranks(self.ranks)} {self.what} in {self.seconds:.2f} s: {rebuilt}"]
        lines += describe_moves(self.numbers)
        if self.notes:
            lines.append(self.notes)
        who = "it" if one else "they"
        if self.cells and self.marked:
            lines.append(f"{who} ran the setup {_cells(self.cells)}")
        elif self.cells:
            lines.append(f"{who} ran the imports and definitions of {_cells(self.cells)}")
        if not self.marked:
            lines.append(
                "`%%distributed --setup` marks cells that a new rank runs in full, such as those that build models"
            )
        lines.append(f"other variables are missing on {describe_ranks(self.ranks)}; those of the other ranks are kept")
        return "\n".join(lines)


def describe_moves(numbers: Mapping[int, int]) -> list[str]:
    """Return who has another number now: a clause for those that have moved by as much."""
    moved = [(before, now) for before, now in numbers.items() if before != now]
    clauses = []
    for _, pairs in groupby(moved, key=lambda pair: pair[0] - pair[1]):
        before, now = zip(*pairs, strict=True)
        verb = "is" if len(before) == 1 else "are"
        clauses.append(f"{describe_ranks(before)} {verb} now {describe_ranks(now)}")
    return ["; ".join(clauses)] if clauses else []


def heal(
    rank_set: RankSet,
    ranks: Ranks,
    *,
    kill: bool,
    catch_up: Callable[[Sequence[int]], None],
    progress: Callable[[StartLine], None] | None = None,
    token_file: str = "",
) -> HealReport:
    """Replace ranks by new processes that take their places in all process groups.

    Args:
        rank_set: The ranks.
        ranks: Which; None for all that have died.
        kill: Whether to end those first that live.
        catch_up: Called with the newcomers before they run any cell.
        progress: Called with lines of text while other machines are waited for, if those of the ranks are lost; None:
                then it fails.
        token_file: Where the tokens of those machines are written; "": they are part of a line.

    Raises:
        UsageError: One of them lives, or it would not help; nothing has changed.
        SessionBusy: Other ranks run something.
        SessionBroken: It failed; the ranks that live are as they were.
        RankError: They were replaced; then a cell that they ran to be set up failed.
        KeyboardInterrupt: The user interrupted it; likewise.
    """
    chosen = _choose(rank_set, ranks, kill)
    if not chosen:
        return HealReport([], 0, rank_set.generation, 0.0, [], marked=False)
    refuse_busy(rank_set, chosen)
    told = progress or (lambda line: None)
    with (
        removed_afterwards(token_file),
        rank_set.talk.dialogue(ALREADY, told, token_file) as ask,
        rank_set.traffic.replacing(chosen),
    ):
        return bring_in(rank_set, ask, Heal(chosen, kill, progress is not None), catch_up, "replaced")


def bring_in(
    rank_set: RankSet, ask: Request, message: Heal | Grow, catch_up: Callable[[Sequence[int]], None], what: str
) -> HealReport:
    """Have newcomers come, set up, and join the groups.

    Args:
        rank_set: The ranks.
        ask: Of a dialogue with the controller.
        message: What it is asked for.
        catch_up: Called with the newcomers before they run any cell.
        what: What becomes of them: "replaced", "added".

    Raises:
        SessionBroken: It failed; the ranks that live are as they were.
        RankError: They came; then a cell that they ran to be set up failed.
        KeyboardInterrupt: The user interrupted it; likewise.
    """
    failure: RankError | None = None
    ran: list[int] = []
    began = time.monotonic()
    failed = _not_done(message, what)
    replaced = request(rank_set, ask, message, Replaced, failed)
    chosen = [info.rank for info in replaced.ranks]
    rank_set.replaced(replaced.ranks)
    seconds = time.monotonic() - began
    try:
        catch_up(chosen)
        for cell, code, where in _setup_of(replaced, chosen):
            _run(rank_set, cell, code, where, what)
            ran.append(cell.number)
    except RankError as error:
        failure = error
    except BaseException as error:
        ask(GiveUpHeal(), (HealFailed,), lambda: None)
        if isinstance(error, KeyboardInterrupt):
            raise interruption.interruption(failed) from None
        raise
    began = time.monotonic()
    healed = request(rank_set, ask, JoinGroups(), Healed, failed)
    seconds += time.monotonic() - began
    rank_set.traffic.generation = healed.generation
    if failure is not None:
        raise failure
    marked = any(cell.marked for cell in replaced.cells)
    return HealReport(
        chosen, healed.groups, healed.generation, seconds, ran, marked, healed.text, what, replaced.numbers
    )


def _not_done(message: Heal | Grow, what: str) -> str:
    if isinstance(message, Grow):
        return f"no rank was {what}"
    return f"{describe_ranks(message.ranks)} {'was' if len(message.ranks) == 1 else 'were'} not {what}"


def _choose(rank_set: RankSet, ranks: Ranks, kill: bool) -> list[int]:
    dead = sorted(rank_set.traffic.dead)
    if ranks is None and kill:
        raise UsageError("--kill ends living ranks, so say which: `%distributed heal -r 1 --kill`")
    if ranks is None and not dead:
        rank_set.check_open()
        return []
    chosen = rank_set.choose(dead if ranks is None else ranks, living=False)
    alive = [rank for rank in chosen if rank not in dead]
    if alive and not kill:
        verb, them = ("has", "it") if len(alive) == 1 else ("have", "them")
        which = format_ranks(alive)
        raise UsageError(
            f"{describe_ranks(alive)} {verb} not died: `%distributed heal -r {which} --kill` ends {them} first; "
            f"variables on {them} are lost"
        )
    if not set(rank_set.living()) - set(chosen):
        raise UsageError(
            "no other rank would be left to restore the process groups from: `%distributed restart` starts fresh ranks"
        )
    return chosen


def refuse_busy(rank_set: RankSet, chosen: Sequence[int]) -> None:
    """Refuse while ranks run what has nothing to do with the ones to be replaced, and so would not end with them."""
    concerned = set(rank_set.traffic.running(chosen).values())
    others = rank_set.traffic.running({info.rank for info in rank_set.ranks} - set(chosen))
    busy = {rank: task for rank, task in others.items() if task not in concerned and not task.bereaved}
    if busy:
        raise rank_set.busy(busy)


def request(rank_set: RankSet, ask: Request, message: Message, kind: type[M], failed: str) -> M:
    """Send a request and wait for its answer. Ctrl-C ends all of it, with nothing half done.

    Args:
        rank_set: The ranks.
        ask: Of a dialogue with the controller.
        message: The request.
        kind: What answers it, unless it fails.
        failed: What is said then, before the reason.
    """
    interrupted = False

    def give_up() -> None:
        nonlocal interrupted
        interrupted = True
        rank_set.traffic.send(GiveUpHeal())

    answer = ask(message, (kind, HealFailed), give_up)
    if isinstance(answer, kind):
        return answer
    assert isinstance(answer, HealFailed)
    if interrupted:
        raise interruption.interruption(failed)
    raise SessionBroken(f"{failed}: {answer.text}")


def _setup_of(replaced: Replaced, newcomers: Sequence[int]) -> Iterator[tuple[SetupCell, str, list[int]]]:
    """Yield what newcomers lack: the cells that were marked for that, else the definitions of all; and on which.

    Ranks that are added run the cells that have run on all ranks that were there.
    """
    marked = [cell for cell in replaced.cells if cell.marked]
    for cell in marked or replaced.cells:
        ranks = sorted(set(cell.ranks) & set(newcomers))
        if replaced.numbers and set(cell.ranks).issuperset(replaced.numbers.values()):
            ranks = list(newcomers)
        code = cell.code if cell.marked else definitions(cell.code)
        if ranks and code:
            yield cell, code, ranks


def _run(rank_set: RankSet, cell: SetupCell, code: str, ranks: Sequence[int], what: str) -> None:
    """Run a cell on newcomers.

    Raises:
        RankError: It failed. The text says that the rank was replaced all the same.
    """
    task = rank_set.submit("cell", code, ranks, CellOptions(cell.number, cell.offset, show=True))
    try:
        task.wait()
    except RankError as error:
        verb = "was" if len(ranks) == 1 else "were"
        done = f"{describe_ranks(ranks)} {verb} {what}; then setup cell {cell.number} failed there:"
        raise type(error)(f"{done}\n{error.report}", error.failures) from None


def _cells(numbers: Sequence[int]) -> str:
    return f"{'cell' if len(set(numbers)) == 1 else 'cells'} {format_ranks(numbers).replace(',', ', ')}"
