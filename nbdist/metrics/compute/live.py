"""Counts the FLOPs of training steps as they run: now and then one whole step.

Owns when a step is counted and what is known of each shape. Independent of time, but for what it is told, and of
hooks: `steps` calls it at the end of each step.
"""

from __future__ import annotations

import contextlib
import signal
import sys
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from nbdist.metrics.compute.counting import Counting, FlopCount, bears_compiled_code
from nbdist.metrics.compute.products import Multiplication
from nbdist.metrics.rates import peaks

_SHAPES = 1024  # that are remembered
_FREE = 8  # counted steps of an optimizer that are made whatever they cost
FREE_SECONDS, _SHARE = 0.5, 0.01  # that further ones may take: this, and this share of the time
_CLOSE = 4  # steps, between two that are to agree on something new
_AGAIN_AFTER = 10  # steps of a lap, until what is known is looked at once more
_CONTROL_FLOW = ("cond", "map_impl")
_PATIENCE = 16  # steps that a shape that was not foreseen is waited for; then the next one is counted, whatever it is
_NOT_YET = sys.maxsize  # a step that never comes
_MISSES = 64  # such counts that a shape is not found by, after which it is waited for no more
_MISSES_IF_TOLD = 2  # the same, for one that batches tell of before its step does
_FAILURES = 2  # counts in a row that an exception ended: one may have been the user's own


class Shape(NamedTuple):
    """What a step looks like: those of one shape take the same work.

    Attributes:
        optimizer: The number of the one that has made it.
        passes: What its backward passes look like.
        batches: The shapes of its batches.
    """

    optimizer: int
    passes: tuple[Hashable, ...]
    batches: frozenset[Hashable]


@dataclass(frozen=True)
class Known:
    """What steps of a shape take.

    Attributes:
        count: As counted.
        work: Hardware FLOPs by the dtypes of `peaks`.
        device: Where the products ran.
        products: Calls by what they multiply.
        batch: Stands for the indices that the first counted step looked up; empty: not known.
    """

    count: FlopCount
    work: dict[str, int]
    device: torch.device
    products: Mapping[Multiplication, int] = field(default_factory=dict)
    batch: str = ""

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
        spent: Seconds that counting has taken, as far as the caller has noted.
        trained: Seconds of steps that were not counted, likewise.
    """

    def __init__(self) -> None:
        self.known: dict[Shape, Known] = {}
        self.why = self.hindrance = ""
        self.spent = self.trained = 0.0
        self._doubtful: dict[Shape, tuple[tuple[int, int], int]] = {}  # figures, and which step it was
        self._steps = 0
        self._looked_at: set[Shape] = set()  # in this lap
        self._wanted: dict[Shape, int] = {}  # to be counted: the step at which it came though it was not foreseen
        self._missed: Counter[Shape] = Counter()  # counts that were to be of a shape, and were of a known one
        self._rare: set[Shape] = set()  # of these, those that are counted only when they are sure to come
        self._is_guess = False  # whether the count under way is of a step that may be any
        self._by_batch: dict[Hashable, Shape] = {}  # shapes to be counted, by a batch that only they have had
        self._ignored: set[Hashable] = set()  # batches that a known shape has had, or a miscounted one
        self._expected: Hashable = None  # the batch for which the count under way was begun
        self._turns: dict[tuple[Shape, int], Shape] = {}  # what came after so many steps of a shape, the last time
        self._in_a_row = 0  # steps of the last shape
        self._postponed: tuple[Shape, bool] | None = None  # arguments of `_begin` for the count of the next step
        self._unfed: set[Shape] = set()  # after a step of which the next one had no batch of its own
        self._last: Shape | None = None
        self._counting: Counting | None = None
        self._overdue = False  # the count could not be left when it should have been, so it is of more than a step
        self._made: Counter[int] = Counter()  # counts, by optimizer
        self._failures = 0  # counts in a row that an exception has ended
        self._has_failed = False  # one, in this lap

    @property
    def under_way(self) -> bool:
        """Whether a step is being counted."""
        return self._counting is not None

    @property
    def is_postponed(self) -> bool:
        """Whether the next step is to be counted from its first batch on."""
        return self._postponed is not None

    @property
    def is_calm(self) -> bool:
        """Whether no step has to be counted: all shapes that have come lately are known, or nothing is ever counted."""
        return not self._wanted or bool(self.why) or self._has_failed

    def enter_optimizer(self, optimizer: object = None) -> None:
        """Count products without autograd as the optimizer's own, from here to the end of the step."""
        if self._counting is not None:
            self._counting.in_optimizer = True

    def end_lap(self) -> None:
        """End the lap: what follows may differ. A count in progress is dropped."""
        self.leave_failed()
        self.leave()
        self._looked_at.clear()
        self._wanted.clear()
        self._missed.clear()
        self._rare.clear()
        self._by_batch.clear()
        self._unfed.clear()
        self._postponed = self._last = None
        self._in_a_row = 0
        self._has_failed = False

    def finish(self, shape: Shape) -> None:
        """End the step that may have been counted, and had this shape."""
        self._steps += 1
        self._note_turn(shape)
        counting = self._counting
        if counting is None and self._wanted.get(shape) == _NOT_YET:
            self._wanted[shape] = self._steps
        if counting is None or not self.leave() or self._overdue:
            return
        if counting.failure:
            self._note_failure(counting.failure)
            return
        self._failures = 0
        if shape in self.known and shape not in self._wanted:
            self._miss(shape)
        tally = counting.whole()
        count = tally.result("a step as it ran")
        if self._is_confirmed(shape, count, alone=not tally.without_autograd):
            device = tally.device or torch.device("cpu")
            before = self.known.get(shape)
            batch = tally.batch if before is None else before.batch  # ranks do not look again at the same time
            self._learn(shape, Known(count, _by_arithmetic(tally.work, device), device, tally.products, batch))

    def _note_turn(self, shape: Shape) -> None:
        """Note which shape has come after the last one, and how many there were of that in a row."""
        last, steps = self._last, self._in_a_row
        self._last, self._in_a_row = shape, steps + 1 if shape == last else 1
        if last is None:
            return
        if shape == last and steps > 1:
            self._turns.pop((last, steps), None)
            return
        self._turns[last, steps] = shape
        if len(self._turns) > _SHAPES:
            del self._turns[next(iter(self._turns))]
        if last.batches and not shape.batches and len(self._unfed) < _SHAPES:
            self._unfed.add(last)

    def _following(self) -> Shape | None:
        """Return which shape will probably come after the last one; None: it has come for the first time.

        Epochs and accumulation make patterns: as many steps of a shape, then one of another.
        """
        if self._last is None:
            return None
        return self._turns.get((self._last, self._in_a_row), self._last if self._in_a_row > 1 else None)

    def _note_failure(self, failure: str) -> None:
        self._has_failed = True
        self._failures += 1
        self.hindrance = f"an operation raised while a step was counted: {failure}"
        if self._failures >= _FAILURES:
            self.why = f"steps can't be counted, for an operation raised twice while one was: {failure}"

    def _miss(self, shape: Shape) -> None:
        """Note that a known shape came instead of one that was waited for."""
        if self._expected is not None:
            self._ignore([self._expected])
        if not (self._is_guess and self._wanted):
            return
        longest = min(self._wanted, key=self._wanted.__getitem__)
        self._missed[longest] += 1
        if self._missed[longest] >= (_MISSES_IF_TOLD if self._is_told(longest, shape) else _MISSES):
            del self._wanted[longest]
            self._rare.add(longest)

    def _is_told(self, wanted: Shape, came: Shape) -> bool:
        """Return whether batches tell of a shape: its own, or that the last step of a loop one batch ahead has none."""
        return not self._by_batch.keys().isdisjoint(wanted.batches) or bool(came.batches and not wanted.batches)

    def _ignore(self, batches: Iterable[Hashable]) -> None:
        """Expect no shape when one of these batches comes."""
        if len(self._ignored) >= _SHAPES:
            self._ignored.clear()
        for batch in batches:
            self._ignored.add(batch)
            self._by_batch.pop(batch, None)

    def _learn(self, shape: Shape, found: Known) -> None:
        self._ignore(shape.batches)
        self.known[shape] = found
        self._looked_at.add(shape)
        self._wanted.pop(shape, None)
        self._rare.discard(shape)
        while len(self.known) > _SHAPES:
            del self.known[next(iter(self.known))]

    def want(self, shape: Shape, steps: int) -> None:
        """Have steps of this shape counted if they should be; arguments as of `consider`."""
        if shape in self._rare or len(self._wanted) + len(self._rare) >= _SHAPES:
            return
        if shape not in self.known:
            self._wanted.setdefault(shape, _NOT_YET)
            self._by_batch.update(dict.fromkeys(shape.batches - self._ignored, shape))
        elif shape not in self._looked_at and steps >= _AGAIN_AFTER:
            self._wanted.setdefault(shape, _NOT_YET)

    def tells_of_wanted(self, batch: Hashable) -> bool:
        """Return whether a step that gets this batch, by its shapes, is probably to be counted, and none is."""
        return batch in self._by_batch and self._counting is None

    def expect(self, batch: Hashable) -> None:
        """Count the step that has just got this batch, its first, if that is worth it; the last one is finished."""
        shape = self._by_batch.get(batch)
        if shape is not None and self._counting is None:
            self._begin(shape, guess=False, batch=batch)

    def consider(self, shape: Shape, steps: int, *, has_batches: bool = False) -> None:
        """Count the next step, if that is worth it. None is under way.

        Args:
            shape: Of the step that has just ended.
            steps: That this lap has had.
            has_batches: Whether steps begin with a batch that is seen. The count waits for it then: a validation before
                it is not part of the step.
        """
        self._postponed = None
        self.want(shape, steps)
        following = self._following()
        sure = following in self._wanted or following in self._rare
        if not (sure or (self._wanted and (following is None or self._has_waited()))):
            return
        if has_batches and shape not in self._unfed:
            self._postponed = shape, not sure
        else:
            self._begin(shape, guess=not sure)

    def begin_postponed(self) -> None:
        """Begin the count that has waited for a batch, which has come."""
        if self._postponed is not None and self._counting is None:
            shape, guess = self._postponed
            self._begin(shape, guess=guess)

    def give_up_postponed(self) -> None:
        """Begin none, as the step is under way without a batch; the next time it is not waited for."""
        if self._postponed is not None:
            self._unfed.add(self._postponed[0])
            self._postponed = None

    def _has_waited(self) -> bool:
        return self._steps - min(self._wanted.values()) >= _PATIENCE

    def _begin(self, shape: Shape, *, guess: bool, batch: Hashable = None) -> None:
        """Count from here on, if that is worth it.

        Args:
            shape: Of the step that has just ended, or, if it is known, of the one that begins.
            guess: Whether that step may be of any shape.
            batch: That tells of it.
        """
        self._postponed = None
        if self.why or self._has_failed:
            return
        known = shape in self.known
        free = not known and self._made[shape.optimizer] < _FREE
        if not free and self.spent > FREE_SECONDS + _SHARE * self.trained:
            return
        self.hindrance = _hindrance()
        if self.hindrance:
            return
        self._looked_at |= {shape} if known else set()
        self._made[shape.optimizer] += 1
        self._overdue, self._is_guess, self._expected = False, guess, batch
        with _uninterrupted():
            self._counting = Counting(eagerly=False)
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

    def leave_failed(self) -> None:
        """End a count that an exception has ended already, in case the step never does."""
        if self._counting is not None and self._counting.failure:
            failure = self._counting.failure
            if self.leave():
                self._note_failure(failure)

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
            self._wanted[shape] = self._steps
        return confirmed


def _by_arithmetic(work: Mapping[tuple[torch.device, str], int], device: torch.device) -> dict[str, int]:
    """Return the work on a device by what it multiplies in, as `peaks` names it."""
    found: Counter[str] = Counter()
    for (where, kind), amount in work.items():
        if where == device:
            found[peaks.name_of_dtype(kind)] += amount
    return dict(found)


def _hindrance() -> str:
    """Return why no step can be counted now."""
    if torch._C._len_torch_dispatch_stack():
        return "a dispatch mode of yours is active, which may end before a count would"
    if _has_control_flow():
        return "torch.cond and torch.map, which were used here, fail below a dispatch mode"
    if _is_compiled() and not bears_compiled_code():
        return f"with PyTorch {torch.__version__}, counting would switch compiled code off"
    return ""


def _has_control_flow() -> bool:
    """Return whether this process has used control flow that PyTorch can only run compiled, even in eager code."""
    operations = (getattr(torch.ops.higher_order, name, None) for name in _CONTROL_FLOW)
    return any(getattr(operation, "_dispatch_cache", None) for operation in operations)


def _is_compiled() -> bool:
    """Return whether this process has compiled anything."""
    found: Any = sys.modules.get("torch._dynamo.utils")
    return found is not None and bool(getattr(found, "counters", {}).get("frames", {}).get("ok"))


@contextlib.contextmanager
def _uninterrupted() -> Iterator[None]:
    """Hold an interrupt back: one that strikes between two lines here could leave compiled code switched off."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
