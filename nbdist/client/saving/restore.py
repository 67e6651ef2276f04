"""Starts a session from a save: its cells that set ranks up, then its training, then the names of its ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from nbdist.base.ranks import describe_ranks, format_ranks
from nbdist.base.text import counted, span
from nbdist.client.healing.heal import definitions
from nbdist.client.ranks.rank_set import RankSet
from nbdist.client.ranks.task_record import CellOptions
from nbdist.client.saving.save import list_left_out, python_version
from nbdist.errors import NbdistError, RankError, UsageError
from nbdist.saving.rank_saving import Restored
from nbdist.saving.rank_saving import restore as restore_on_rank
from nbdist.saving.saved_session import SESSION_FILE, SavedSession, read
from nbdist.train.checkpoint.checkpoint_folder import by_age, check_files, partials, read_manifest
from nbdist.wire.messages.healing import SetupCell

_MAKERS = {
    "models": "model",
    "optimizers": "optimizer",
    "schedulers": "scheduler",
    "loaders": "loader",
    "registered": "object registered for checkpoints",
    "scaler": "gradient scaler",
}


@dataclass(frozen=True)
class RestoreReport:
    """What has come back. It prints as a few lines.

    Attributes:
        path: The save.
        saved: What it tells of its session.
        ran: The numbers of the setup cells that have run.
        defined: The numbers of the cells of which imports and definitions have run.
        restored: What has come back on each rank.
    """

    path: Path
    saved: SavedSession
    ran: Sequence[int]
    defined: Sequence[int]
    restored: Sequence[Restored]

    @property
    def left_out(self) -> Mapping[str, str]:
        """The names that are missing on a rank, with the reasons."""
        return {missing.name: missing.why for each in self.restored for missing in each.left_out}

    def __str__(self) -> str:
        saved, first = self.saved, self.restored[0]
        by = f"saved {span(saved.age())} ago by {counted(saved.world_size, 'rank')}"
        names = set().union(*(each.names for each in self.restored))
        lines = [f"restored from {self.path} ({by}): {counted(len(names), 'name')}"]
        if self.ran:
            lines.append(f"ran as setup: {_cells(self.ran)}")
        if self.defined:
            lines.append(f"ran the imports and definitions of {_cells(self.defined)}")
        if first.training:
            lines.append(first.training)
        if first.unprepared:
            lines.append(self._explain_unprepared(first.unprepared))
        if first.differ:
            lines.append(self._explain_different(first.differ))
        return "\n".join([*lines, *list_left_out("not restored", self.left_out)])

    def _explain_unprepared(self, roles: Sequence[str]) -> str:
        things = ", ".join(_MAKERS[role] for role in roles)
        makers = [cell.number for cell in self.saved.cells if not cell.marked and ".prepare(" in cell.code]
        run = f"run {_cells(makers)} again" if makers else "prepare the same again"
        return (
            f"the training is not loaded, as setup cells don't prepare what was prepared ({things}): {run}, then "
            f"`nbdist.load_state({str(self.path)!r})` on all ranks. `%%distributed --setup` marks such cells"
        )

    def _explain_different(self, names: Sequence[str]) -> str:
        count = len(self.restored)
        what = f"not the same on all {self.saved.world_size} ranks: {', '.join(names)}"
        if count > self.saved.world_size:
            added = describe_ranks(range(self.saved.world_size, count))
            return f"{what}; {added} can have them from setup cells only"
        return f"{what}; each rank has those that the rank of its number had"


def find(directory: Path) -> tuple[Path, SavedSession]:
    """Return the newest whole save in a folder, or the save that it is, and what it tells.

    Raises:
        UsageError: There is none that this Python can load.
        CheckpointError: It is damaged.
    """
    if not directory.is_dir():
        raise UsageError(
            f"there is no folder {directory.name!r} in {directory.resolve().parent}: give `--from` the folder that "
            "`%distributed save` was given"
        )
    candidates = [directory] if read_manifest(directory) else by_age(directory)
    saves = [path for path in candidates if (path / SESSION_FILE).exists()]
    if not saves:
        raise UsageError(_explain_none(directory, candidates))
    path = saves[-1]
    check_files(path, read_manifest(path) or {"files": {}})
    saved = read(path)
    if saved.python != python_version():
        raise UsageError(
            f"{path} was saved by Python {saved.python}, and this is Python {python_version()}, which can't read its "
            f"functions: start it in an environment with Python {saved.python}"
        )
    return path, saved


def _explain_none(directory: Path, checkpoints: Sequence[Path]) -> str:
    if checkpoints:
        return (
            f"{checkpoints[-1]} is a checkpoint of save_state, without the names of a session: start a session, "
            "prepare the model, and load it with nbdist.load_state"
        )
    unfinished = ", ".join(path.name for path in partials(directory))
    reason = (
        f"it holds only saves that did not finish ({unfinished})" if unfinished else "`%distributed save` makes one"
    )
    return f"{directory} holds no save of a session: {reason}"


def restore(rank_set: RankSet, path: Path, saved: SavedSession) -> RestoreReport:
    """Bring back what ranks had, on ranks that have just been started.

    Raises:
        RankError: A setup cell has failed.
        CheckpointError: Files are missing, or can't be read.
        UsageError: The training is of another model than the setup cells make.
    """
    ran: list[int] = []
    defined: list[int] = []
    for cell in saved.cells:
        if cell.marked:
            _run_setup(rank_set, cell)
            ran.append(cell.number)
        elif _define(rank_set, cell):
            defined.append(cell.number)
    restored = rank_set.set_up(restore_on_rank, str(path.absolute()))
    if isinstance(restored[0], NbdistError):
        raise restored[0]
    return RestoreReport(path, saved, ran, defined, restored)


def _run_setup(rank_set: RankSet, cell: SetupCell) -> None:
    task = rank_set.submit("cell", cell.code, None, CellOptions(cell.number, cell.offset, show=True, setup=True))
    try:
        task.wait()
    except RankError as error:
        raise type(error)(
            f"the session was not restored, as setup {_cells([cell.number])} failed; setup cells may use only what "
            f"setup cells and definitions have made:\n{error.report}",
            error.failures,
        ) from None


def _define(rank_set: RankSet, cell: SetupCell) -> bool:
    """Run the imports and definitions of a cell, for setup cells and ranks that heal. Returns whether there are any.

    They may fail, as when a default value is a name that comes later: functions and classes are among the names, too.
    """
    code = definitions(cell.code)
    if not code:
        return False
    task = rank_set.submit("cell", code, None, CellOptions(cell.number, cell.offset))
    try:
        task.wait()
    except RankError:
        return False
    return True


def _cells(numbers: Sequence[int]) -> str:
    if not any(numbers):  # by `session.run`
        return counted(len(numbers), "cell")
    return f"{'cell' if len(set(numbers)) == 1 else 'cells'} {format_ranks(numbers).replace(',', ', ')}"
