"""How a checkpoint gets onto the disk: each rank writes its part, then all agree, then it gets its name.

Either at once or in a thread, which talks to the other ranks in a process group of its own and so does not disturb
training. Independent of what is saved.
"""

from __future__ import annotations

import atexit
import contextlib
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemWriter
from torch.distributed.tensor import DTensor

from nbdist.errors import CheckpointError
from nbdist.train.checkpoint.checkpoint_folder import Draft, keep_newest, partial_folder, write_durably
from nbdist.train.checkpoint.packed_parts import in_pieces
from nbdist.train.collective import agreement
from nbdist.train.state import rank, world_size

Further = Callable[[Path], None]

_LOOK = 1.0  # seconds between two looks at how the others' threads are doing
_running: Save | None = None
_side_group: dist.ProcessGroup | None = None


class Save:
    """A checkpoint that is being written, or has been.

    Attributes:
        path: Its folder.
        lost_touch: Whether it failed so that the other ranks did not hear of it, as after an interrupt.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._thread: threading.Thread | None = None
        self._writing: Writing | None = None
        self._error: CheckpointError | None = None
        self.lost_touch = False

    @property
    def done(self) -> bool:
        """Whether it has been written, or has failed."""
        return self._thread is None or self._error is not None or not self._thread.is_alive()

    def wait(self) -> None:
        """Wait until it has been written.

        Raises:
            CheckpointError: It could not be.
        """
        self.join()
        if self._error is not None:
            raise self._error

    def join(self, limit: float | None = None) -> None:
        """Wait until it has been written or has failed, or for at most this many seconds."""
        if self._thread is not None and not self.done:
            self._thread.join(limit)

    def give_up(self) -> None:
        """Take it for failed: its thread waits for another rank that has failed."""
        if not self.done and self._writing is not None:
            self._error = CheckpointError(
                f"{self.path} was not saved: ranks lost contact with each other, as after an interrupt. Save again"
            )
            self._writing.discard()

    def __repr__(self) -> str:
        if not self.done:
            return f"saving {self.path}"
        return str(self._error) if self._error else f"saved {self.path}"

    def begin(self, writing: Writing, tensors: dict[str, torch.Tensor], values: bytes) -> None:
        """Write it in a thread. Its tensors must be copies."""
        global _running
        try:
            group = _group_beside_training()
        except BaseException:  # Ctrl-C included: half a checkpoint is none
            writing.discard()
            raise

        def run() -> None:
            try:
                writing.run(tensors, values, group)
            except CheckpointError as error:
                self._error = error
            except Exception as error:  # in a thread: nobody else would hear of it
                self.lost_touch = True  # first, as an error means that it is done
                self._error = CheckpointError(f"{self.path} was not saved: {type(error).__name__}: {error}")
            if self._error is not None and rank() == 0:  # nobody may ever ask
                print(f"CheckpointError: {self._error}", file=sys.stderr)

        # The end of the process waits for it by `wait_for_saves`, unless it was given up.
        self._writing = writing
        self._thread = threading.Thread(target=run, name=f"nbdist saves {self.path}", daemon=True)
        self._thread.start()
        _running = self


def wait_for_saves() -> None:
    """Wait until the running asynchronous save has ended. Its handle reports the result."""
    global _running
    if _running is not None:
        _running.join()
        _running = None


def wait_for_saves_of_all() -> bool:
    """Wait for saves on all ranks, which give up together what one of them can't continue.

    Returns:
        Whether all have ended; a thread that was given up may still read what it writes.
    """
    global _running, _side_group
    while True:
        told = agreement.gather((_running is None or _running.done, _running is not None and _running.lost_touch))
        has_lost = any(lost for _, lost in told)
        if has_lost:
            _side_group = None  # others may wait in it for long
            if _running is not None:
                _running.give_up()
        if has_lost or all(done for done, _ in told):
            _running = None
            return not has_lost
        if _running is not None:
            _running.join(_LOOK)


atexit.register(wait_for_saves)


@dataclass
class Writing:
    """Writes a checkpoint on this rank, with the others.

    Attributes:
        target: Its folder.
        draft: On rank 0: what becomes the folder.
        manifest: What it tells of itself.
        keep: How many checkpoints stay.
        from_one_rank: Whether what all ranks hold is taken from rank 0, as they may differ.
        further: Writes what else this rank has into the folder; None: there is nothing else.
    """

    target: Path
    draft: Draft | None
    manifest: Mapping[str, Any]
    keep: int | None
    from_one_rank: bool
    further: Further | None = None

    def run(self, tensors: dict[str, torch.Tensor], values: bytes, group: dist.ProcessGroup | None = None) -> None:
        """Write this rank's part, and on rank 0 give the whole its name.

        Args:
            tensors: By name, the same names on all ranks that hold them.
            values: What belongs to this rank alone.
            group: What ranks talk in; None: the default group.

        Raises:
            CheckpointError: A rank could not write. What was written is removed.
        """
        try:
            with agreement.together(group):
                self._write(tensors, values, group)
            with agreement.together(group):
                if self.draft is not None:
                    self._publish(self.draft)
        except CheckpointError as error:
            self.discard()
            raise CheckpointError(f"{self.target} was not saved: {error}") from error.__cause__
        except BaseException:  # Ctrl-C included: half a checkpoint is none
            self.discard()
            raise

    def _write(self, tensors: dict[str, torch.Tensor], values: bytes, group: dist.ProcessGroup | None) -> None:
        folder = partial_folder(self.target)
        failure: Exception | None = None
        try:  # the collective part first, whatever happens here: the others wait in it
            write_durably(folder / file_of(rank()), values)
            if self.further is not None:
                self.further(folder)
        except Exception as error:  # raised below, after the collective part
            failure = error
        planner = DefaultSavePlanner(dedup_save_to_lowest_rank=self.from_one_rank)
        with without_group_warning():
            dcp.save(
                in_pieces(tensors),
                storage_writer=_Writer(folder),
                planner=planner,
                process_group=group,
                no_dist=world_size() == 1,
            )
        if failure is not None:
            raise failure

    def _publish(self, draft: Draft) -> None:
        unseen = [other for other in range(world_size()) if not (draft.folder / file_of(other)).exists()]
        if unseen:
            raise CheckpointError(
                f"rank 0 does not see what rank {unseen[0]} has written: give a path on a file system that all share"
            )
        draft.publish(self.manifest)
        if self.keep is not None:
            keep_newest(draft.path.parent, self.keep)

    def discard(self) -> None:
        """Remove what was written."""
        if self.draft is not None:
            self.draft.discard()


class _Writer(FileSystemWriter):
    def write_data(self, plan: Any, planner: Any) -> Any:
        """Raise what the system has said, where `torch.save` says only that it came to a wrong position."""
        try:
            return super().write_data(plan, planner)
        except RuntimeError as error:
            if isinstance(error.__context__, OSError):
                raise error.__context__ from None
            raise


def file_of(number: int) -> str:
    """Return the name of the file with what belongs to one rank."""
    return f"rank-{number:05d}.pt"


@contextlib.contextmanager
def without_group_warning() -> Iterator[None]:
    """Keep torch from warning that one process saves alone: that is what was asked for."""
    if world_size() > 1:
        yield
        return
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


def _group_beside_training() -> dist.ProcessGroup | None:
    """Return a process group that training doesn't use; made on first use, and again where a rank has lost it."""
    global _side_group
    if world_size() == 1:
        return None
    if not all(agreement.gather(_is_usable(_side_group))):
        _side_group = dist.new_group(backend="gloo")
    return _side_group


def _is_usable(group: dist.ProcessGroup | None) -> bool:
    try:
        return group is not None and dist.get_rank(group) >= 0
    except ValueError:  # of an earlier set of groups
        return False


@torch.no_grad()
def copy_to_cpu(tensors: Mapping[str, torch.Tensor], copies: MutableMapping[str, torch.Tensor]) -> None:
    """Copy tensors to CPU memory, from which a checkpoint is written while training changes the originals.

    Copies of before are used again: fresh memory costs more time than the copying. Returns when the originals may
    change.

    Args:
        tensors: By name; shards are DTensors.
        copies: What an earlier call has filled, or nothing. What is not among the tensors is removed.
    """
    for name in copies.keys() - tensors.keys():
        del copies[name]
    for name, tensor in tensors.items():
        if name not in copies or _layout(copies[name]) != _layout(tensor):
            copies.pop(name, None)  # before there is another one: together they may not fit
            copies[name] = _empty_copy(tensor)
        _local(copies[name]).copy_(_local(tensor), non_blocking=True)
    if any(tensor.is_cuda for tensor in tensors.values()):
        torch.cuda.current_stream().synchronize()


def _layout(tensor: torch.Tensor) -> tuple[object, ...]:
    sharding = (tensor.device_mesh, tensor.placements) if isinstance(tensor, DTensor) else None
    return tensor.shape, tensor.dtype, sharding


def _empty_copy(tensor: torch.Tensor) -> torch.Tensor:
    copy = torch.empty_like(tensor.detach(), device="cpu")
    if not tensor.is_cuda:
        return copy
    pinned = torch.empty_like(_local(copy), pin_memory=True)  # else the GPU's copies wait for the CPU's
    if not isinstance(copy, DTensor):
        return pinned
    copy._local_tensor = pinned  # as torch's own staging does
    return copy


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
