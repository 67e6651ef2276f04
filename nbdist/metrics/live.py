"""Counts the FLOPs of training steps as they run: now and then one whole step.

Owns when a step is counted and what is known of each shape. Knows nothing of time but what it is told, and nothing of
hooks: `steps` calls it at the end of each step.
"""

from __future__ import annotations

import contextlib
import signal
import sys
from collections import Counter
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from nbdist.errors import UsageError
from nbdist.metrics import peaks
from nbdist.metrics.flops import Counting, FlopCount

_SHAPES = 1024  # that are remembered
_FREE = 4  # counted steps of an optimizer that are made whatever they cost
_FREE_SECONDS, _SHARE = 0.5, 0.01  # that further ones may take: this, and this share of the time
_AGAIN_AFTER = 10  # steps of a lap, until what is known is looked at once more
_HEADROOM = 2.0  # times the memory of a compiled step's activations that an eager one may take


@dataclass(frozen=True)
class Known:
    """What steps of a shape take.

    Attributes:
        count: As counted.
        work: Hardware FLOPs by the dtypes of `peaks`.
        device: Where the products ran.
        lap: In which they were counted last.
    """

    count: FlopCount
    work: dict[str, int]
    device: torch.device
    lap: int


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
        self.known: dict[Hashable, Known] = {}
        self.why = self.hindrance = ""
        self.spent = self.trained = 0.0
        self._doubtful: dict[Hashable, tuple[int, int]] = {}
        self._counting: Counting | None = None
        self._overdue = False  # the step is over, and the count could not be left
        self._made: Counter[int] = Counter()  # counts, by optimizer
        self._attempts = 0

    @property
    def under_way(self) -> bool:
        """Whether a step is being counted."""
        return self._counting is not None

    def enter_optimizer(self) -> None:
        """From here to the end of the step, products without autograd are the optimizer's own."""
        if self._counting is not None:
            self._counting.in_optimizer = True

    def finish(self, shape: Hashable, lap: int) -> None:
        """The step that may have been counted ends, and had this shape."""
        counting = self._counting
        if counting is None:
            return
        if not self.leave():
            self._overdue = True
            return
        if self._overdue:  # more than a step
            self._overdue = False
            return
        count = counting.result("a step as it ran")
        if counting.without_autograd and not self._is_confirmed(shape, count):
            return
        while len(self.known) >= _SHAPES:
            del self.known[next(iter(self.known))]
        device = counting.device or torch.device("cpu")
        work = {_short(dtype, device): amount for dtype, amount in count.per_dtype.items()}
        self.known[shape] = Known(count, work, device, lap)

    def consider(
        self, shape: Hashable, optimizer: int, optimizers: int, lap: int, steps: int, device: torch.device
    ) -> None:
        """Count the next step, if that is worth it. None is under way.

        Args:
            shape: Of the step that has just ended: the next one probably has the same, or one that was there before it.
            optimizer: The number of the one that has made it.
            optimizers: How many take turns.
            lap: The number of this lap.
            steps: That it has had.
            device: Where the parameters are.
        """
        known = self.known.get(shape)
        if known is None:
            self._attempts = max(1, optimizers)
        again = known is not None and known.lap != lap and steps >= _AGAIN_AFTER
        if self.why or not (self._attempts or again):
            return
        free = not again and self._made[optimizer] < _FREE
        if not free and self.spent > _FREE_SECONDS + _SHARE * self.trained:
            return
        self.hindrance = _hindrance(device, early=free and steps <= 2)
        if self.hindrance:
            return
        self._made[optimizer] += 1
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
                return False
            self._counting = None
        return True

    def _is_confirmed(self, shape: Hashable, count: FlopCount) -> bool:
        """Whether another step of this shape agrees.

        A forward pass that nothing is differentiated through belongs to each step, as a teacher's does or a reentrant
        checkpoint's, or it was a validation between two of them.
        """
        figures = (count.model_flops, count.hardware_flops)
        known = self.known.get(shape)
        before = self._doubtful.pop(shape, None)
        if figures == before or (known and figures == (known.count.model_flops, known.count.hardware_flops)):
            return True
        self._doubtful[shape] = figures
        return False


def _short(dtype: str, device: torch.device) -> str:
    """The dtype as `peaks` names it; fp32 in tensor cores is another one."""
    try:
        found = peaks.short(dtype)
    except UsageError:
        return dtype
    in_tensor_cores = device.type == "cuda" and torch.get_float32_matmul_precision() != "highest"
    return "tf32" if found == "fp32" and in_tensor_cores else found


def _hindrance(device: torch.device, *, early: bool) -> str:
    """Why no step can be counted now.

    Args:
        device: Where the parameters are.
        early: Whether all ranks count this very step, if they count any.
    """
    if torch._C._len_torch_dispatch_stack():
        return "a dispatch mode of yours is active, which may end before a count would"
    if not _is_compiled():
        return ""
    if not early and not _is_alone():
        return "ranks with compiled code are counted in the second and third step of a cell only"
    if not _fits(device):
        return "the GPU is too full for a step that is not compiled; nbdist.metrics.flops.count needs no memory"
    return ""


def _is_compiled() -> bool:
    """Whether this process has compiled anything: a counted step runs without, and may need more memory."""
    found: Any = sys.modules.get("torch._dynamo.utils")
    return found is not None and bool(getattr(found, "counters", {}).get("frames", {}).get("ok"))


def _is_alone() -> bool:
    """Whether no other rank has to decide alike: compiled collectives may come in another order than eager ones."""
    return not torch.distributed.is_initialized() or torch.distributed.get_world_size() == 1


def _fits(device: torch.device) -> bool:
    """Whether a step that is not compiled will find the memory it needs."""
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
