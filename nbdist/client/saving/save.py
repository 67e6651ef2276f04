"""Saves a session: the names of its ranks, its training, and the cells that have run."""

from __future__ import annotations

import ast
import os
import platform
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nbdist._version import __version__
from nbdist.base.ranks import describe_ranks
from nbdist.base.text import counted, duration, size
from nbdist.client.ranks.rank_set import RankSet
from nbdist.client.ranks.step_calls import call_after_step
from nbdist.client.start.start_settings import StartSettings
from nbdist.errors import NbdistError, SessionBusy, SessionError, UsageError
from nbdist.saving.rank_saving import Saved
from nbdist.saving.rank_saving import save as save_on_rank
from nbdist.saving.saved_session import SavedSession
from nbdist.wire.messages.healing import SetupCell

KEEP = 2
# Those of the start that are not of one machine.
_SETTINGS = ("backend", "init", "timeout", "linger", "keep", "exact", "on_death", "save", "every")
_SHOWN = 8
_one_at_a_time = threading.Lock()  # the user's, those of a clock, and those at the end
_STOP_LIMIT = 60.0  # seconds for cells to end; then the error says where their ranks are


@dataclass(frozen=True)
class SaveReport:
    """What was saved. It prints as a few lines.

    Attributes:
        path: The folder of this save.
        seconds: What it took.
        size: Bytes of all files.
        steps: Optimizer steps that had been made.
        names: The names that each rank has saved.
        left_out: The names that could not be saved on some rank, with the reasons.
        notes: What else there is to know.
    """

    path: Path
    seconds: float
    size: int
    steps: int
    names: Mapping[int, Sequence[str]]
    left_out: Mapping[str, str]
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        names = set().union(*self.names.values())
        what = f"{counted(len(names), 'name')} of {describe_ranks(self.names)}"
        training = f", training at step {self.steps:,}" if self.steps else ""
        lines = [f"saved {self.path} in {duration(self.seconds)}: {what}{training}, {size(self.size)}"]
        lines += list_left_out("not saved", self.left_out)
        lines += self.notes
        lines.append(f"`%distributed start --from {self.path.parent}` starts a session from it")
        return "\n".join(lines)


def save(
    rank_set: RankSet, directory: Path, keep: int | None, plan: str, settings: StartSettings, *, stop: bool
) -> SaveReport:
    """Save what ranks have, one save at a time.

    The arguments beside the ranks are those of `Session.save`, and of the session.

    Args:
        rank_set: The ranks.
        directory: Where saves are.
        keep: How many may stay there; None: all.
        plan: The session's plan, as JSON.
        settings: Those of its start.
        stop: Whether to stop first what ranks run.

    Raises:
        UsageError: An argument is invalid, or ranks have died; nothing was written.
        SessionBusy: Ranks run something else than one cell that trains on all of them.
        SessionError: The cell was interrupted, or a rank has died; earlier saves are whole.
        CheckpointError: It could not be written; earlier saves are whole.
    """
    with _one_at_a_time:
        return _save(rank_set, directory, keep, plan, settings, stop=stop)


def _save(
    rank_set: RankSet, directory: Path, keep: int | None, plan: str, settings: StartSettings, *, stop: bool
) -> SaveReport:
    if keep is not None and (not isinstance(keep, int) or keep < 1):
        raise UsageError(f"keep={keep!r}: give how many saves may stay, at least 1, or None for all")
    chosen = rank_set.choose(None)
    if len(chosen) > 1 and rank_set.backend == "none":
        raise UsageError(
            "these ranks have no process group (`--no-init`), in which they would agree on a save: start the session "
            "without `--no-init` to save it"
        )
    if stop:
        _stop(rank_set, chosen)
    cells = rank_set.traffic.history()
    session = SavedSession(
        nbdist=__version__,
        python=python_version(),
        saved_at=time.time(),
        world_size=len(chosen),
        cells=cells,
        plan=plan,
        settings=_portable(settings),
    )
    began = time.monotonic()
    saved = _save_on(rank_set, chosen, str(directory.absolute()), keep, session)
    if isinstance(saved, NbdistError):
        raise saved
    told = saved.session
    names = {number: each.kept for number, each in zip(chosen, told.ranks, strict=True)}
    missing = {each.name: each.why for own in told.ranks for each in own.left_out}
    left_out = {name: f"{why}{_where(name, cells)}" for name, why in missing.items()}
    seconds = time.monotonic() - began
    return SaveReport(
        directory / Path(saved.folder).name, seconds, saved.size, told.steps, names, left_out, tuple(_advice(told))
    )


def _save_on(rank_set: RankSet, ranks: Sequence[int], *how: Any) -> Saved | NbdistError:
    """Save on all ranks: at once, or in the cell that trains on them, after its next step."""
    running = rank_set.traffic.running(ranks)
    if not running:
        found: list[Saved | NbdistError] = rank_set.set_up(save_on_rank, *how)
        return found[0]
    task, *others = set(running.values())
    if others or list(task.ranks) != list(ranks) or task.kind not in ("cell", "call"):
        raise rank_set.busy(running)
    try:
        found = call_after_step(rank_set, task, save_on_rank, *how)
    except SessionBusy as error:
        why = f"A save can be made after a step of a cell that trains, but {error}. `--stop` stops the cell first."
        raise SessionBusy(f"{rank_set.busy(running)}\n{why}") from None
    except SessionError as error:
        raise SessionError(f"{error}. Earlier saves are whole") from None
    return found[0]


def _portable(settings: StartSettings) -> dict[str, Any]:
    given = ((name, value) for name, value in settings.given().items() if name in _SETTINGS)
    return {name: os.fspath(value) if isinstance(value, os.PathLike) else value for name, value in given}


def _stop(rank_set: RankSet, ranks: Sequence[int]) -> None:
    """Have cells end, those that train after the same step on all ranks."""
    for task in set(rank_set.traffic.running(ranks).values()):
        task.interrupt(ranks)
    rank_set.traffic.wait_free(ranks, _STOP_LIMIT)


def python_version() -> str:
    """Return the minor version, as functions travel as its bytecode."""
    return ".".join(platform.python_version_tuple()[:2])


def list_left_out(what: str, left_out: Mapping[str, str]) -> list[str]:
    """Return lines about names that stay behind."""
    lines = [f"{what}: {name}: {why}" for name, why in list(left_out.items())[:_SHOWN]]
    more = len(left_out) - _SHOWN
    return [*lines, f"{what}: {counted(more, 'more name')}"] if more > 0 else lines


def _advice(saved: SavedSession) -> Iterator[str]:
    if any(saved.ranks[0].prepared.values()) and not any(cell.marked for cell in saved.cells):
        yield (
            "no cell is marked as setup: mark those that build and prepare the model with `%%distributed --setup`, so "
            "that a session that starts from this runs them"
        )


def _where(name: str, cells: Sequence[SetupCell]) -> str:
    """Return which cell has made a name last, in words for the end of a clause."""
    number = next((cell.number for cell in reversed(cells) if name in bound_names(cell.code)), 0)
    return f" (cell {number})" if number else ""


def bound_names(code: str) -> set[str]:
    """Return the names that a cell binds; of one that is not plain Python, none."""
    try:
        nodes = list(ast.walk(ast.parse(code)))
    except SyntaxError:
        return set()
    stored = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    kinds = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
    return stored | {node.name for node in nodes if isinstance(node, kinds)}
