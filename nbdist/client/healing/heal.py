"""Replaces dead ranks of a session, gives them up, or adds others; newcomers run what they lack of the cells before."""

from __future__ import annotations

import ast
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import TypeVar

from nbdist.base.checks import check_whole
from nbdist.base.ranks import describe_ranks, format_ranks
from nbdist.base.text import counted
from nbdist.client.base import interruption
from nbdist.client.ranks.rank_set import Ranks, RankSet
from nbdist.client.ranks.task_record import CellOptions
from nbdist.client.start.controller_talk import Request
from nbdist.client.start.starting import StartLine, removed_afterwards
from nbdist.errors import RankError, SessionBroken, UsageError
from nbdist.wire.base.message import Message
from nbdist.wire.messages.healing import (
    GiveUpHeal,
    Grow,
    Heal,
    Healed,
    HealFailed,
    JoinGroups,
    Replaced,
    SetupCell,
    Shrink,
)

_DEFINITIONS = (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


def definitions(code: str) -> str:
    """Return a cell's imports, functions and classes, each on its own line; "" if it has none.

    Args:
        code: Python, with IPython's own syntax (`!ls`, `%magic`), as the user typed it.
    """
    if code.lstrip().startswith("%%"):
        return ""
    from IPython.core.inputtransformer2 import TransformerManager  # not where only launches are

    try:
        code = TransformerManager().transform_cell(code)
        statements = ast.parse(code).body
    except SyntaxError:  # it failed everywhere
        return ""
    lines = code.splitlines()
    kept = [""] * len(lines)
    for statement in statements:
        if isinstance(statement, _DEFINITIONS):
            first, last = _extent(statement)
            alone = sum(first <= _extent(other)[1] and _extent(other)[0] <= last for other in statements) == 1
            source = lines[first - 1 : last] if alone else [ast.unparse(statement)]
            kept[first - 1] = f"{kept[first - 1]}\n{source[0]}".lstrip("\n")
            kept[first : first + len(source) - 1] = source[1:]
    return "\n".join(kept).rstrip() if any(kept) else ""


def _extent(statement: ast.stmt) -> tuple[int, int]:
    """Return the first and last line of a statement, with its decorators."""
    decorators = getattr(statement, "decorator_list", [])
    first = min([statement.lineno, *(decorator.lineno for decorator in decorators)])
    return first, statement.end_lineno or statement.lineno


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
    except BaseException as error:  # a Ctrl-C, too: ranks wait for the newcomers until they hear of it
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
