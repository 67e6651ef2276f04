"""Counts the FLOPs of training steps as they run: now and then one whole step.

Owns when a step is counted and what is known of each shape. Knows nothing of time but what it is told, and nothing of
hooks: `steps` calls it at the end of each step.
"""

from __future__ import annotations

import contextlib
import signal
import sys
from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from nbdist.errors import UsageError
from nbdist.metrics.compute import peaks
from nbdist.metrics.compute.counting import Counting, FlopCount
from nbdist.metrics.compute.passes import Fingerprint

_SHAPES = 1024  # that are remembered
_OPTIMIZERS = 64  # whose last step is remembered
_FREE = 4  # counted steps of an optimizer that are made whatever they cost
_FREE_SECONDS, _SHARE = 0.5, 0.01  # that further ones may take: this, and this share of the time
_CLOSE = 4  # steps, between two that are to agree on something new
_AGAIN_AFTER = 10  # steps of a lap, until what is known is looked at once more
_CONTROL_FLOW = ("cond", "map_impl")
_HEADROOM = 2.0  # times the memory of a compiled step's activations that an eager one may take


class Shape(NamedTuple):
    """What a step looks like: those of one shape take the same work.

    Attributes:
        optimizer: The number of the one that has made it.
        passes: Its backward passes.
        batches: The shapes of its batches.
    """

    optimizer: int
    passes: tuple[Fingerprint, ...]
    batches: frozenset[Hashable]

    def compiles(self, other: Shape) -> bool:
        """Return whether this may be a step of the other's shape, with parts of it compiled."""
        return (
            (self.optimizer, self.batches, len(self.passes)) == (other.optimizer, other.batches, len(other.passes))
            and self != other
            and all(mine == its or mine.compiles(its) for mine, its in zip(self.passes, other.passes, strict=True))
        )


@dataclass(frozen=True)
class Known:
    """What steps of a shape take.

    Attributes:
        count: As counted.
        work: Hardware FLOPs by the dtypes of `peaks`.
        device: Where the products ran.
    """

    count: FlopCount
    work: dict[str, int]
    device: torch.device

    @property
    def figures(self) -> tuple[int, int]:
        """Model and hardware FLOPs."""
        return self.count.model_flops, self.count.hardware_flops


class LiveCounts:
    """What is known of the steps of one thread, and the count that is under way.

    Attributes:
        known: By shape.
        why: Why nothing is ever counted; empty: it is.
        hindrance: Why the last step that was worth it could not be counted; empty: it could.
        spent: Seconds that counting has added; whoever takes the time keeps it.
        trained: Seconds that all other steps took, likewise.
    """

    def __init__(self) -> None:
        self.known: dict[Shape, Known] = {}
        self.why = self.hindrance = ""
        self.spent = self.trained = 0.0
        self._doubtful: dict[Shape, tuple[tuple[int, int], int]] = {}  # figures, and which step it was
        self._steps = 0
        self._looked_at: set[Shape] = set()  # in this lap
        self._counted: Shape | None = None  # of the last count, until the next step of its optimizer
        self._latest: dict[int, Shape] = {}  # of the last step that was not counted, by optimizer
        self._counting: Counting | None = None
        self._overdue = False  # the count could not be left when it should have been, so it is of more than a step
        self._made: Counter[int] = Counter()  # counts, by optimizer
        self._attempts = 0

    @property
    def under_way(self) -> bool:
        """Whether a step is being counted."""
        return self._counting is not None

    def enter_optimizer(self) -> None:
        """Count products without autograd as the optimizer's own, from here to the end of the step."""
        if self._counting is not None:
            self._counting.in_optimizer = True

    def end_lap(self) -> None:
        """End the lap: what follows may differ. A count in progress is dropped."""
        self.leave()
        self._looked_at.clear()

    def finish(self, shape: Shape) -> None:
        """End the step that may have been counted, and had this shape."""
        counting = self._counting
        self._steps += 1
        if counting is None:
            self._carry_over(shape)
            return
        if not self.leave() or self._overdue:
            return
        count = counting.result("a step as it ran")
        if not self._is_confirmed(shape, count, alone=not counting.without_autograd):
            return
        device = counting.device or torch.device("cpu")
        work = {_short(dtype, device): amount for dtype, amount in count.per_dtype.items()}
        before = self.known.get(shape)  # which those share that it was carried over to
        shapes = [shape, *(other for other, its in self.known.items() if its is before)]
        self._learn(shapes, Known(count, work, device))
        self._counted = shape

    def _carry_over(self, shape: Shape) -> None:
        """Carry a count over from eager steps to steps with compiled code, which do the same work."""
        before = self._latest.pop(shape.optimizer, None)
        while len(self._latest) >= _OPTIMIZERS:
            del self._latest[next(iter(self._latest))]
        self._latest[shape.optimizer] = shape
        counted = self._counted
        if counted is None or counted.optimizer != shape.optimizer:
            return
        self._counted = None
        if before == shape and shape.compiles(counted) and counted in self.known:
            self._learn([shape], self.known[counted])

    def _learn(self, shapes: Sequence[Shape], found: Known) -> None:
        self.known |= dict.fromkeys(shapes, found)
        self._looked_at.update(shapes)
        while len(self.known) > _SHAPES:
            del self.known[next(iter(self.known))]

    def consider(self, shape: Shape, optimizers: int, steps: int, device: torch.device) -> None:
        """Count the next step, if that is worth it. None is under way.

        Args:
            shape: Of the step that has just ended: the next one probably has the same, or one that was there before it.
            optimizers: How many take turns.
            steps: That this lap has had.
            device: Where the parameters are.
        """
        known = shape in self.known
        if not known:
            self._attempts = max(1, optimizers)
        again = known and shape not in self._looked_at and steps >= _AGAIN_AFTER
        if self.why or not (self._attempts or again):
            return
        free = not again and self._made[shape.optimizer] < _FREE
        if not free and self.spent > _FREE_SECONDS + _SHARE * self.trained:
            return
        self.hindrance = _hindrance(device, early=free and steps <= 2)
        if self.hindrance:
            return
        self._looked_at |= {shape} if known else set()
        self._made[shape.optimizer] += 1
        self._attempts = max(0, self._attempts - 1)
        self._overdue = False
        with _uninterrupted():
            self._counting = Counting()
            self._counting.enter()

    def leave(self) -> bool:
        """Count no longer; what was counted of the step is lost, unless it is over.

        Returns:
            False while a dispatch mode that the user has entered since keeps that from being possible.
        """
        if self._counting is None:
            return True
        with _uninterrupted():
            if not self._counting.leave():
                self._overdue = True
                return False
            self._counting = None
        return True

    def _is_confirmed(self, shape: Shape, count: FlopCount, *, alone: bool) -> bool:
        """Return whether another step of this shape agrees, or it needs none that does.

        A forward pass that nothing is differentiated through belongs to each step, as a teacher's does or a reentrant
        checkpoint's, or it was a validation between two of them. With autograd on, a validation shows only in that the
        shape took less before; as it comes back with each epoch, it takes a step close by to overrule what is known.

        Args:
            alone: Whether all that ran was differentiated through, as far as can be seen.
        """
        figures = (count.model_flops, count.hardware_flops)
        known = self.known.get(shape)
        before, at = self._doubtful.pop(shape, (None, 0))
        if known is None:
            confirmed = alone or figures == before
        else:
            confirmed = figures == known.figures or (figures == before and self._steps - at <= _CLOSE)
        if not confirmed:
            self._doubtful[shape] = figures, self._steps
            self._attempts = max(self._attempts, 2)
        return confirmed


def _short(dtype: str, device: torch.device) -> str:
    """Return the dtype as `peaks` names it; fp32 in tensor cores is another one."""
    try:
        found = peaks.short(dtype)
    except UsageError:
        return dtype
    return "tf32" if found == "fp32" and device.type == "cuda" and peaks.in_tensor_cores() else found


def _hindrance(device: torch.device, *, early: bool) -> str:
    """Return why no step can be counted now.

    Args:
        device: Where the parameters are.
        early: Whether all ranks count this very step, if they count any.
    """
    if torch._C._len_torch_dispatch_stack():
        return "a dispatch mode of yours is active, which may end before a count would"
    if _has_control_flow():
        return "torch.cond and torch.map, which were used here, fail below a dispatch mode"
    if not _is_compiled():
        return ""
    if not early and not _is_alone():
        return "ranks with compiled code are counted in the second and third step of a cell only"
    if not _fits(device):
        return "the GPU is too full for a step that is not compiled; nbdist.metrics.flops.count needs no memory"
    return ""


def _has_control_flow() -> bool:
    """Return whether this process has used control flow that PyTorch can only run compiled, even in eager code."""
    operations = (getattr(torch.ops.higher_order, name, None) for name in _CONTROL_FLOW)
    return any(getattr(operation, "_dispatch_cache", None) for operation in operations)


def _is_compiled() -> bool:
    """Return whether this process has compiled anything: a counted step runs without, and may need more memory."""
    found: Any = sys.modules.get("torch._dynamo.utils")
    return found is not None and bool(getattr(found, "counters", {}).get("frames", {}).get("ok"))


def _is_alone() -> bool:
    """Return whether no other rank must decide alike: compiled collectives may run in another order than eager ones."""
    return not torch.distributed.is_initialized() or torch.distributed.get_world_size() == 1


def _fits(device: torch.device) -> bool:
    """Return whether a step that is not compiled will find the memory it needs."""
    if device.type != "cuda":
        return True
    allocated = torch.cuda.memory_allocated(device)
    free = torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device) - allocated
    return bool(free >= _HEADROOM * (torch.cuda.max_memory_allocated(device) - allocated))


@contextlib.contextmanager
def _uninterrupted() -> Iterator[None]:
    """Hold an interrupt back: one that strikes between two lines here could leave compiled code switched off."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
