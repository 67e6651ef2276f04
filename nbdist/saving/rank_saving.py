"""What a rank does for a save and a restore. All ranks do it together."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from nbdist import shells
from nbdist.errors import CheckpointError, NbdistError, UsageError
from nbdist.saving.saved_session import SESSION_FILE, LeftOut, NamesOfRank, SavedSession, read
from nbdist.train.checkpoint.checkpoint_folder import by_age, sync, write_durably

if TYPE_CHECKING:
    from nbdist.saving.name_pickler import PickledNames, Reference, Surroundings
    from nbdist.train.state import State

_PREFIX = "save-"
_NO_OWN = {"nbdist", "rank", "local_rank", "world_size", "device"}


@dataclass(frozen=True)
class Saved:
    """What was saved.

    Attributes:
        folder: Of the save.
        size: Bytes of all its files; known to rank 0.
        session: What it tells of the session.
    """

    folder: str
    size: int
    session: SavedSession


@dataclass(frozen=True)
class Restored:
    """What has come back on a rank.

    Attributes:
        names: Those that have.
        left_out: Those that have not, nor were made by setup cells, with the reasons.
        differ: Those that were not the same on all ranks that saved them, if these were another number.
        training: What was loaded of the training, in a line; "": nothing.
        unprepared: Roles of which other numbers of things are prepared now than were: then no training was loaded.
    """

    names: list[str]
    left_out: list[LeftOut]
    differ: list[str]
    training: str
    unprepared: list[str]


def save(directory: str, keep: int | None, session: SavedSession) -> Saved | NbdistError:
    """Save this rank's names and the training, with the other ranks.

    Args:
        directory: Where saves are.
        keep: How many may stay there; None: all.
        session: What is known of the session.

    Returns:
        What was saved. Or an error, the same on all ranks: UsageError, something can't be saved, or not there;
        CheckpointError, it could not be written. What was written of it is removed then; earlier saves are whole.
    """
    try:
        return _save(Path(directory), keep, session)
    except NbdistError as error:
        return error


def _save(directory: Path, keep: int | None, session: SavedSession) -> Saved:
    from nbdist.saving.name_pickler import pickle_names
    from nbdist.train import state as training
    from nbdist.train.checkpoint.checkpoint import save_with
    from nbdist.train.collective import agreement

    state = training.current()
    with agreement.together():
        target = _next_name(directory) if training.rank() == 0 else Path()
    target = agreement.tell(target)
    with agreement.together():
        around = _surroundings(state)
        pickled = pickle_names(_own_names(around.namespace), around)
    told = NamesOfRank(list(pickled.streams), pickled.left_out, _counts(state), pickled.size)
    whole = msgspec.structs.replace(session, steps=state.steps, ranks=agreement.gather(told))

    def write(folder: Path) -> None:
        _write(folder / _file_of(training.rank()), pickled)
        if training.rank() == 0:
            write_durably(folder / SESSION_FILE, msgspec.json.encode(whole))

    save_with(target, keep, write, state)
    files = (path for path in target.rglob("*") if path.is_file())
    written = sum(path.stat().st_size for path in files) if training.rank() == 0 else 0
    return Saved(str(target), written, whole)


def restore(folder: str) -> Restored | NbdistError:
    """Load a save's training into what is prepared, and make this rank's names, with the other ranks.

    Args:
        folder: Of one save.

    Returns:
        What has come back. Or an error, the same on all ranks: CheckpointError, files are missing, or can't be read;
        UsageError, the training is of another model.
    """
    try:
        return _restore(Path(folder))
    except NbdistError as error:
        return error


def _restore(path: Path) -> Restored:
    from nbdist.saving.name_pickler import make_names
    from nbdist.train import state as training
    from nbdist.train.checkpoint.checkpoint import load_state
    from nbdist.train.collective import agreement

    with agreement.together():
        saved = read(path)
    state = training.current()
    was, now = saved.ranks[0].prepared, _counts(state)
    unprepared = [role for role, count in was.items() if now[role] != count]
    loaded = ""
    if not unprepared:
        with warnings.catch_warnings():  # the notes are part of what is returned
            warnings.filterwarnings("ignore", message=f"{re.escape(str(path))} was loaded, but")
            loaded = repr(load_state(path, state=state))
    with agreement.together():
        own = training.rank() if training.rank() < saved.world_size else 0
        pickled = _read(path / _file_of(own), state.device)
    differ = _different_names(path, saved)
    around = _surroundings(state)
    values, left_out = make_names(pickled, around)
    if training.rank() >= saved.world_size:
        values = {name: value for name, value in values.items() if name not in differ}
    around.namespace.update(values)
    missing = [each for each in (*saved.ranks[own].left_out, *left_out) if each.name not in around.namespace]
    return Restored(list(values), missing, differ, loaded, unprepared)


def _different_names(path: Path, saved: SavedSession) -> list[str]:
    """Return the names that ranks had saved with different values, if they were another number than now.

    Each rank reads a part of the files.
    """
    from nbdist.train import state as training
    from nbdist.train.collective import agreement

    if saved.world_size == training.world_size():
        return []
    with agreement.together():
        own = range(training.rank(), saved.world_size, training.world_size())
        digests = {number: _read(path / _file_of(number), "cpu").digests() for number in own}
    found: dict[int, dict[str, bytes]] = {}
    for theirs in agreement.gather(digests):
        found |= theirs
    names = set().union(*found.values())
    return sorted(name for name in names if len({each.get(name) for each in found.values()}) > 1)


def _next_name(directory: Path) -> Path:
    """Return the folder of the next save.

    Raises:
        UsageError: The folder also has other checkpoints, which would go with the oldest saves.
    """
    if others := [path for path in by_age(directory) if not (path / SESSION_FILE).exists()]:
        raise UsageError(f"{directory} holds checkpoints of save_state ({others[0].name}): give another folder")
    numbers = [0]
    if directory.is_dir():
        found = (path.name.removeprefix(_PREFIX).partition(".")[0] for path in directory.glob(f"{_PREFIX}*"))
        numbers += [int(number) for number in found if number.isdecimal()]
    return directory / f"{_PREFIX}{max(numbers) + 1}"


def _file_of(number: int) -> str:
    return f"names-{number:05d}.pt"


def _write(path: Path, pickled: PickledNames) -> None:
    import torch

    torch.save(pickled.content(), path)
    sync(path)


def _read(path: Path, device: Any) -> PickledNames:
    """Return the names in a file, with the memory that was on a GPU on this rank's."""
    import torch

    from nbdist.saving.name_pickler import PickledNames

    try:
        content = torch.load(path, weights_only=True, map_location={f"cuda:{n}": str(device) for n in range(64)})
    except Exception as error:  # torch raises what it likes for a damaged file
        raise CheckpointError(f"{path} can't be read: {type(error).__name__}: {error}") from error
    return PickledNames.of(content)


def _own_names(namespace: Mapping[str, Any]) -> dict[str, Any]:
    """Return the names that are the user's."""
    hidden = getattr(shells.current(), "user_ns_hidden", {})
    return {
        name: value
        for name, value in namespace.items()
        if isinstance(name, str) and name not in hidden and name not in _NO_OWN and not name.startswith("__")
    }


def _surroundings(state: State) -> Surroundings:
    from nbdist.saving.name_pickler import Surroundings

    return Surroundings(shells.current().user_ns, dict(_prepared(state)))


def _things(state: State) -> dict[str, list[Any]]:
    """Return what is prepared, by its role."""
    return {
        "models": list(state.models),
        "optimizers": list(state.optimizers),
        "schedulers": list(state.schedulers),
        "loaders": list(state.loaders),
        "registered": list(state.registered),
        "scaler": [] if state.scaler is None else [state.scaler],
    }


def _counts(state: State) -> dict[str, int]:
    return {role: len(things) for role, things in _things(state).items()}


def _prepared(state: State) -> Iterator[tuple[Reference, Any]]:
    """Yield what refers to what is prepared, or to a part of a model, with what it refers to.

    Parts have the names that they have in the user's own model, whatever wraps it.
    """
    from nbdist.train.checkpoint.state_snapshot import plain_name

    for role, things in _things(state).items():
        for number, thing in enumerate(things):
            yield (role, number, ""), thing
    for number, model in enumerate(state.models):
        for name, module in model.named_modules():
            yield ("modules", number, plain_name(model, name) if name else ""), module
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            yield ("parameters", number, plain_name(model, name)), tensor
