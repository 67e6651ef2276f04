"""What moves in a step besides parameters: buffers (BatchNorm's statistics) and random state, kept as they were at the
end of the last optimizer step, so that a lost step can be undone (`--exact`).

Knows which models live; independent of cells or the wire. Random generators that the user has made
(`torch.Generator`, `numpy.random.default_rng`) are not among what is kept: nothing knows of them.
"""

from __future__ import annotations

import contextlib
import importlib
import random
import sys
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from nbdist.worker.recovery.random_record import RandomRecord
from nbdist.worker.recovery.reset_models import living, loaded

if TYPE_CHECKING:
    from torch import Tensor

_NOTHING_KEPT = (
    "nbdist: `--exact` could not copy buffers and random state ({}), so a step that is lost now is not undone exactly. "
    "Free memory, or start without `--exact`."
)


class ExactState:
    """Keeps one snapshot, taken again after each optimizer step. All calls on the main thread.

    Attributes:
        steps: Optimizer steps since the rank's beginning; of a newcomer, since that of the rank it has replaced.
        record: Where the random state is kept for a newcomer; None: nowhere.
    """

    def __init__(self) -> None:
        self.steps = 0
        self.record: RandomRecord | None = None
        self._buffers: list[_KeptBuffer] = []
        self._optimizers: weakref.WeakSet[Any] = weakref.WeakSet()
        self._random = _RandomState()
        self._taken = False
        self._gave_up = False  # in this cell

    def begin(self) -> None:
        """Begin a cell: find the living models, and keep what they and the generators hold."""
        self._optimizers.clear()
        self._gave_up = False
        self._keep(find=True)

    def before_step(self, optimizer: object) -> None:
        """Keep the random state for a newcomer before an optimizer step, in which ranks may run out of memory.

        The others have the gradients of all and make the step, so it counts as made: few optimizers draw numbers.
        """
        if self.record is not None and not self._gave_up:
            coming = _RandomState()
            with contextlib.suppress(MemoryError, RuntimeError):  # as in `_keep`
                coming.take()
                self.record.write(self.steps + 1, coming.kept)

    def snapshot(self, optimizer: object) -> None:
        """Take a snapshot at the end of an optimizer step.

        Args:
            optimizer: Whose step. One that was not seen in this cell belongs to models that are new, too.
        """
        self.steps += 1
        new = optimizer not in self._optimizers
        self._optimizers.add(optimizer)
        if not self._gave_up:
            self._keep(find=new)

    def restore(self) -> list[str]:
        """Put everything back as it was at the end of the last step, or at the beginning of the cell.

        Returns:
            What was done, for people; empty if nothing had been kept.
        """
        if not self._taken:
            return []
        moved = [kept for kept in self._buffers if kept.put_back()]
        self._random.put_back()
        buffers = "buffers and " if moved else ""
        return [f"{buffers}random state of the lost step restored"]

    def resume(self, steps: int, record: RandomRecord) -> list[str]:
        """Go on with the random numbers of the rank that this one has replaced.

        Args:
            steps: That the other ranks have made.
            record: What that rank has left.

        Returns:
            What is not as it would have been, for people.
        """
        self.steps, self.record = steps, record
        kept = record.read(steps)
        if kept is None:
            return ["its random state is new, because the dead rank had not started a cell"]
        made, states = kept
        _RandomState(states).put_back()
        return (
            []
            if made == steps
            else [f"its random state is from after step {made:,}; the others have made {steps:,} steps"]
        )

    def _keep(self, *, find: bool) -> None:
        try:
            if find:
                self._find_buffers()
            self._take()
        except (MemoryError, RuntimeError) as error:  # the cell goes first: it may be the one that frees memory
            self._taken, self._gave_up, self._buffers = False, True, []
            print(_NOTHING_KEPT.format(f"{type(error).__name__}: {error}".splitlines()[0]), file=sys.stderr)

    def _take(self) -> None:
        for kept in self._buffers:
            kept.take()
        self._random.take()
        self._taken = True
        if self.record is not None:
            self.record.write(self.steps, self._random.kept)

    def _find_buffers(self) -> None:
        known = {kept.key: kept for kept in self._buffers if kept.lives}
        found = [_KeptBuffer(*place) for place in _buffers()]
        self._buffers = [known.get(kept.key, kept) for kept in found]


def _buffers() -> Iterator[tuple[Any, str, bool]]:
    """Yield each buffer with data of each living module: the module, the name, whether writes to it go uncounted."""
    norm = loaded("torch.nn.modules.batchnorm", "_NormBase")
    fake = loaded("torch._subclasses.fake_tensor", "FakeTensor")
    for module in living(loaded("torch.nn", "Module")):
        for name, buffer in module.__dict__.get("_buffers", {}).items():
            if buffer is not None and not buffer.is_meta and (fake is None or not isinstance(buffer, fake)):
                yield module, name, norm is not None and issubclass(type(module), norm)


class _KeptBuffer:
    """A buffer of a module, and its copy. The module may go; the copy is made only when the buffer has changed.

    Args:
        module: Held weakly.
        name: Of the buffer in the module.
        uncounted: Whether the kernels that write to the buffer don't count its versions, as those of BatchNorm.
    """

    def __init__(self, module: object, name: str, uncounted: bool) -> None:
        self.key = (id(module), name)
        self._module = weakref.ref(module)
        self._name = name
        self._uncounted = uncounted
        self._copy: Any = None
        self._seen: tuple[int, int] | None = None

    @property
    def lives(self) -> bool:
        """Whether the module does."""
        return self._owner() is not None

    def take(self) -> None:
        buffer = self._buffer()
        if buffer is None:
            return
        stamp = (id(buffer), _version(buffer))
        if stamp == self._seen and not self._uncounted and stamp[1] >= 0:
            return
        if _alike(self._copy, buffer):
            self._copy.copy_(buffer)
        else:
            self._copy = buffer.detach().clone()
        self._seen = stamp

    def put_back(self) -> bool:
        """Put the buffer back, and return whether it had changed."""
        buffer = self._buffer()
        if buffer is None or self._copy is None:
            return False
        if not _alike(self._copy, buffer):  # the lost step has put another tensor there
            self._owner().__dict__["_buffers"][self._name] = self._copy.clone()
            return True
        if _same_bytes(buffer, self._copy):
            return False
        buffer.detach().copy_(self._copy)
        return True

    def _owner(self) -> Any:
        return self._module()

    def _buffer(self) -> Any:
        module = self._owner()
        return None if module is None else module.__dict__.get("_buffers", {}).get(self._name)


def _version(buffer: Tensor) -> int:
    """Return how often a tensor has been written to, or -1 if that is not counted."""
    return -1 if buffer.is_inference() else int(buffer._version)


def _alike(one: Tensor | None, other: Tensor) -> bool:
    return one is not None and bool(
        one.shape == other.shape and one.dtype == other.dtype and one.device == other.device
    )


def _same_bytes(one: Any, other: Any) -> bool:
    """Return whether two tensors are equal, with NaN equal to NaN."""
    import torch

    return bool(torch.equal(one, other) or ((one == other) | ((one != one) & (other != other))).all())


@dataclass
class _RandomState:
    """The states of the process's own generators."""

    kept: dict[str, Any] = field(default_factory=dict)

    def take(self) -> None:
        self.kept = {"random": random.getstate()}
        if (numpy := sys.modules.get("numpy.random")) is not None:
            self.kept["numpy"] = numpy.get_state()
        if (torch := sys.modules.get("torch")) is not None:
            self.kept["torch"] = torch.get_rng_state()
            if torch.cuda.is_initialized():
                self.kept["cuda"] = torch.cuda.get_rng_state_all()

    def put_back(self) -> None:
        random.setstate(self.kept["random"])
        if "numpy" in self.kept:
            importlib.import_module("numpy.random").set_state(self.kept["numpy"])
        if "torch" in self.kept:
            sys.modules["torch"].set_rng_state(self.kept["torch"])
        if "cuda" in self.kept:
            sys.modules["torch"].cuda.set_rng_state_all(self.kept["cuda"])
