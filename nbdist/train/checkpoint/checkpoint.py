"""Checkpoints of the whole training: `save_state` and `load_state`, on all ranks together.

Tensors go through torch.distributed.checkpoint, so that they load into any strategy and number of ranks; all else goes
into one file for each rank. Knows which steps a save and a load are made of. What is kept of a state is in
`state_snapshot`, what a whole checkpoint is on the disk in `checkpoint_folder`, and how one gets there in `saving`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader, TensorStorageMetadata

from nbdist._version import __version__
from nbdist.errors import CheckpointError, UsageError
from nbdist.train import active_training
from nbdist.train.checkpoint.checkpoint_folder import (
    Draft,
    check_files,
    find,
    is_previous,
    latest,
    partial_folder,
    partials,
    read_manifest,
)
from nbdist.train.checkpoint.packed_parts import in_pieces
from nbdist.train.checkpoint.saving import (
    Further,
    Save,
    Writing,
    copy_to_cpu,
    file_of,
    wait_for_saves_of_all,
    without_group_warning,
)
from nbdist.train.checkpoint.state_snapshot import Restoring, Snapshot, joined, take
from nbdist.train.collective import agreement, meeting
from nbdist.train.collective.rng import random_digests
from nbdist.train.loop import averages
from nbdist.train.sharding.zero_engine import DeepSpeedModel, engines_among, load_engines, save_engines
from nbdist.train.state import State, current, rank, world_size

_FOLDER = "checkpoints"


@dataclass(frozen=True)
class LoadReport:
    """What `load_state` has loaded. It prints as one line.

    Attributes:
        path: The checkpoint's folder.
        steps: Optimizer steps that had been made.
        world_size: Number of ranks that had saved it.
        notes: What is not as it was when it was saved.
    """

    path: Path
    steps: int
    world_size: int
    notes: tuple[str, ...] = ()

    def __repr__(self) -> str:
        return "; ".join([f"loaded {self.path}: step {self.steps:,}, saved by {_ranks(self.world_size)}", *self.notes])


def register_for_checkpointing(*objects: Any, state: State | None = None) -> None:
    """Have checkpoints keep these objects too. To be called on all ranks, in the same order in each run.

    Args:
        objects: Modules, and whatever has `state_dict()` and `load_state_dict()`.
        state: The training they belong to; the current one by default.

    Raises:
        UsageError: An object lacks one of these methods; none was registered.
    """
    for thing in objects:
        for method in ("state_dict", "load_state_dict"):
            if not callable(getattr(thing, method, None)):
                raise UsageError(
                    f"{type(thing).__name__} has no {method}(): checkpoints keep objects with state_dict() and "
                    "load_state_dict()"
                )
    registered = (state or current()).registered
    registered.extend(thing for thing in objects if not any(thing is known for known in registered))


def save_state(
    path: str | os.PathLike[str] | None = None,
    *,
    keep: int | None = None,
    asynchronous: bool = False,
    limit: float | None = None,
    state: State | None = None,
) -> Save:
    """Save everything that is prepared or registered: a run that loads it goes on as if it had not been interrupted.

    >>> nbdist.save_state(keep=3)
    saved checkpoints/step-1200

    To be called on all ranks, between optimizer steps. The checkpoint appears all at once: a save that is killed, or
    that fails, leaves those before whole. Each rank's random generators and position in the data are kept as well.

    Args:
        path: The folder to make, on a file system that all ranks share; checkpoints/step-N by default. A checkpoint
            of this name is replaced.
        keep: How many checkpoints may stay in the folder around it, this one included; None: all.
        asynchronous: Return as soon as the tensors are copied to CPU memory, and write them meanwhile. The next save
            and the end of the process wait for it.
        limit: Seconds to wait for ranks that have not called it; None: NBDIST_SAVE_LIMIT, else as long as a
            collective may take (`--timeout` of the session). Who is missing is said after 30 s.
        state: The training to save; the current one by default.

    Returns:
        A handle; with `asynchronous` its `wait()` tells how it went.

    Raises:
        UsageError: Not all ranks have called it, or something can't be saved. Nothing was written.
        CheckpointError: It could not be written, as when the disk is full. What was written of it is removed.
    """
    state = state or current()
    target = Path(path) if path is not None else Path(_FOLDER, f"step-{state.steps}")
    meeting.meet("save_state", {"path": str(target), "keep": keep, "asynchronous": asynchronous}, limit)
    if keep is not None and (not isinstance(keep, int) or keep < 1):
        raise UsageError(f"keep={keep!r}: give how many checkpoints may stay, at least 1")
    return _save(target, keep, asynchronous=asynchronous, state=state)


def save_with(target: Path, keep: int | None, further: Further, state: State) -> None:
    """Save like `save_state`, at once, with what else ranks have; nothing need be prepared.

    Args:
        target: The folder to make. The same on all ranks.
        keep: How many checkpoints may stay in the folder around it; None: all.
        further: Writes this rank's own files into the folder that becomes the checkpoint.
        state: The training to save.

    Raises:
        UsageError: Something can't be saved. Nothing was written.
        CheckpointError: It could not be written. What was written of it is removed.
    """
    _save(target, keep, asynchronous=False, state=state, further=further)


def _save(target: Path, keep: int | None, *, asynchronous: bool, state: State, further: Further | None = None) -> Save:
    engines = engines_among(state.models)
    if asynchronous and engines:
        raise UsageError("DeepSpeed writes its part of a checkpoint at once: leave out asynchronous")
    _come_to_rest(state)
    snapshot, manifest = _snapshot(state, may_be_empty=further is not None)
    with agreement.together():
        values = _pickled(snapshot.values)
        tensors = snapshot.tensors
        if asynchronous:
            copy_to_cpu(tensors, state.copies)
            tensors = dict(state.copies)
    draft: Draft | None = None
    with agreement.together():
        if rank() == 0:
            draft = Draft(target)
    state.saved_in = str(target.parent)
    writing = Writing(target, draft, manifest, keep, bool(state.plan.local_sgd_steps), further)
    save = Save(target)
    if engines:
        _save_engines(engines, writing)
    if asynchronous:
        save.begin(writing, tensors, values)
    else:
        writing.run(tensors, values)
    return save


def _save_engines(engines: list[DeepSpeedModel], writing: Writing) -> None:
    try:
        with agreement.together():
            save_engines(engines, partial_folder(writing.target))
    except BaseException:  # Ctrl-C included: half a checkpoint is none
        writing.discard()
        raise


def load_state(
    path: str | os.PathLike[str] | None = None, *, limit: float | None = None, state: State | None = None
) -> LoadReport:
    """Load a checkpoint into what is prepared and registered. To be called on all ranks, after `prepare`.

    The strategy and the number of ranks may be others than when it was saved, except under DeepSpeed. With another
    number of ranks random generators that were not the same on all ranks get new seeds, made of the old state and the
    rank; and what is registered gets what rank 0 had. Checkpoints hold pickles: load only those that you trust.

    Args:
        path: A checkpoint, or a folder with checkpoints, of which the newest whole one is taken; "checkpoints" by
            default.
        limit: Seconds to wait for ranks that have not called it; None: NBDIST_SAVE_LIMIT, else as long as a
            collective may take (`--timeout` of the session). Who is missing is said after 30 s.
        state: The training to load into; the current one by default.

    Returns:
        What was loaded, and what is not as it was.

    Raises:
        UsageError: There is no whole checkpoint, or it is of another model. Nothing was loaded.
        CheckpointError: Files are missing, or can't be read. The text says whether anything was loaded.
    """
    state = state or current()
    asked = Path(path) if path is not None else Path(_FOLDER)
    meeting.meet("load_state", {"path": str(asked)}, limit)
    _come_to_rest(state)
    with agreement.together():
        found = find(asked) if rank() == 0 else asked
    found = agreement.tell(found)
    with agreement.together():
        manifest, values = _read(found)
        kept = FileSystemReader(found).read_metadata().state_dict_metadata.items()
        types = {
            n: (entry.size, entry.properties.dtype) for n, entry in kept if isinstance(entry, TensorStorageMetadata)
        }
        restoring = Restoring(state, values, {name: size for name, (size, _) in types.items()})
        _refuse_other_ranks(state, manifest)
        slots = restoring.slots(types)
    try:
        with agreement.together(), without_group_warning(), _without_stages_warning(state):
            dcp.load(in_pieces(slots), storage_reader=FileSystemReader(found), no_dist=world_size() == 1)
        with agreement.together():
            load_engines(engines_among(state.models), found)
        with agreement.together():
            own = manifest["world_size"] == world_size()
            seed = None if own else f"{manifest['random_seed']} {rank()} of {world_size()}"
            restoring.finish(slots, seed, manifest["random_shared"])
    except (CheckpointError, UsageError) as error:
        raise CheckpointError(
            f"{error}. Load it again, or another one: prepared objects may now hold a part of {found}"
        ) from error
    active_training.newcomer = False
    notes = agreement.tell(_notes(asked, found, manifest, state) + restoring.notes if rank() == 0 else [])
    if notes and rank() == 0:
        warnings.warn(f"{found} was loaded, but {'; '.join(notes)}", stacklevel=2)
    return LoadReport(found, state.steps, manifest["world_size"], tuple(notes))


@contextlib.contextmanager
def _without_stages_warning(state: State) -> Iterator[None]:
    """Keep torch from warning that ranks read different tensors: stages of a pipeline do, and no others."""
    if state.stages is None:
        yield
        return
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Detected mismatched keys in state dict")
        yield


def _refuse_other_ranks(state: State, manifest: Mapping[str, Any]) -> None:
    if engines_among(state.models) and manifest["world_size"] != world_size():
        raise UsageError(
            f"a checkpoint of DeepSpeed's that {_ranks(manifest['world_size'])} saved can't be loaded by "
            f"{_ranks(world_size())}: start that many, or load weights that `save_model` wrote. Nothing was loaded"
        )


def latest_state(path: str | os.PathLike[str] = _FOLDER) -> Path | None:
    """Return the newest whole checkpoint in a folder; None if there is none. Any rank may ask.

    >>> if nbdist.latest_state("checkpoints"):
    ...     nbdist.load_state("checkpoints")
    """
    return latest(Path(path))


def _come_to_rest(state: State) -> None:
    """Wait for the save that is running, and let go of models that were replaced.

    Raises:
        UsageError: A model holds its averaged weights.
    """
    with agreement.together():
        averages.refuse_inside("save_state or load_state", state)
    if not wait_for_saves_of_all():
        state.copies = {}
    state.tidy()


def _snapshot(state: State, *, may_be_empty: bool) -> tuple[Snapshot, dict[str, Any]]:
    """Return what this rank keeps, and the manifest of the whole."""
    with agreement.together():
        snapshot = take(state)
        if not (snapshot.tensors or may_be_empty or engines_among(state.models)):
            raise UsageError("nothing is prepared, so there is nothing to save: call nbdist.prepare(model, ...) first")
        if state.micro_step and rank() == 0:
            warnings.warn(
                "gradients since the last optimizer step are not in the checkpoint. Save when nbdist.sync_gradients() "
                "is true",
                stacklevel=4,
            )
    told = agreement.gather((snapshot.models, snapshot.buffers, random_digests(snapshot.values["random"])))
    _refuse_different_models([models for models, _, _ in told])
    _keep_own_buffers(snapshot, told[0][1])
    if state.stages is not None:
        snapshot.values["optimizers"] = joined(agreement.gather(snapshot.values["optimizers"], state.stages.group))
    digests = [digest for _, _, digest in told]
    shared = [name for name in digests[0] if all(digest.get(name) == digests[0][name] for digest in digests)]
    return snapshot, {
        "nbdist": __version__,
        "torch": torch.__version__,
        "world_size": world_size(),
        "steps": state.steps,
        "plan": _plan_values(state),
        "random_shared": shared,
        "random_seed": digests[0]["torch"],
    }


def _refuse_different_models(models: Sequence[Mapping[str, str]]) -> None:
    """Raise an error if a replaced model is still referenced on some ranks: shards of different models don't fit."""
    for number, theirs in enumerate(models):
        if theirs != models[0]:
            counts = f"{len(models[0])} on rank 0, {len(theirs)} on rank {number}"
            raise UsageError(
                f"ranks hold different prepared models ({counts}): an earlier one is still referenced on some of them, "
                "as by a variable or Out. Delete it there, or type %distributed free; then save again"
            )


def _keep_own_buffers(snapshot: Snapshot, of_rank_0: Mapping[str, str]) -> None:
    """Rank 0's buffers stand for all. Those of other ranks that differ, as BatchNorm's do, stay with their rank."""
    if rank() == 0:
        return
    own = {name for name, digest in snapshot.buffers.items() if digest != of_rank_0.get(name)}
    snapshot.values["buffers"] = {name: snapshot.tensors[name].cpu() for name in own}
    for name in snapshot.buffers:
        del snapshot.tensors[name]


def _plan_values(state: State) -> dict[str, Any]:
    """Return the plan as JSON holds it; functions by their names."""
    values = dataclasses.asdict(state.plan)
    loaded: dict[str, Any] = json.loads(
        json.dumps(values, default=lambda value: getattr(value, "__name__", str(value)))
    )
    return loaded


def _pickled(values: dict[str, Any]) -> bytes:
    buffer = io.BytesIO()
    try:
        torch.save(values, buffer)
    except Exception as error:  # user objects raise what they like from __reduce__
        wrong = next((kind for kind, value in values.items() if not _can_be_pickled(value)), "state")
        raise UsageError(f"the {wrong} can't be saved: {type(error).__name__}: {error}") from error
    return buffer.getvalue()


def _can_be_pickled(value: Any) -> bool:
    try:
        torch.save(value, io.BytesIO())
    except Exception:  # as above
        return False
    return True


def _read(found: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return a checkpoint's manifest, and the values for this rank."""
    manifest = read_manifest(found)
    if manifest is None:  # rank 0 has seen it
        raise CheckpointError(f"{found} does not exist here: give a path on a file system that all ranks share")
    check_files(found, manifest)
    number = rank() if manifest["world_size"] == world_size() else 0
    return manifest, torch.load(found / file_of(number), map_location="cpu", weights_only=False)


def _notes(asked: Path, found: Path, manifest: Mapping[str, Any], state: State) -> list[str]:
    notes = [f"{path} is ignored: it was never completed" for path in partials(asked)]
    if is_previous(found):
        notes.append("a save that would have replaced it was killed: this is the previous checkpoint")
    now = _plan_values(state)
    changed = [f"{name} {was} → {now[name]}" for name, was in manifest["plan"].items() if now.get(name, was) != was]
    if changed:
        notes.append(f"the plan was different: {', '.join(changed)}")
    if manifest["world_size"] == world_size():
        return notes
    seeded = sorted({"python", "numpy", "torch"} - set(manifest["random_shared"]))
    if seeded:
        there = "there is" if world_size() == 1 else "there are"
        notes.append(f"{there} {_ranks(world_size())} now: random generators have new seeds ({', '.join(seeded)})")
    if state.loaders:
        notes.append("all ranks continue in the data where rank 0 was")
    if state.registered:
        notes.append("registered objects are as they were on rank 0")
    return notes


def _ranks(count: int) -> str:
    return f"{count} rank{'s' if count > 1 else ''}"
