"""Which sizes of a model and its batch cost time on this device, and what others would save: measured, not guessed.

Looks at the products of the last steps that were counted. Nothing of the training is touched: products are made of
numbers of their own, and their memory is given back.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from nbdist import shells
from nbdist.base.text import percent
from nbdist.metrics import steps
from nbdist.metrics.advice import sizes, trials
from nbdist.metrics.advice.named_weights import weights
from nbdist.metrics.advice.roles import HEAD, ROWS, Placed, Role, placed, with_size
from nbdist.metrics.compute.products import Attention, Multiplication, Product
from nbdist.metrics.node.host import trim_malloc
from nbdist.metrics.rates import peaks

WORTH = 0.03  # share of a step
_LOOKED_AT = 0.01  # share of the FLOPs of a step, from which on a product is measured
_TRIAL = 2.0  # seconds of one comparison, about


@dataclass(frozen=True)
class ProductCost:
    """A product of a step, as it is.

    Attributes:
        name: Of the modules that it belongs to.
        what: Its sizes.
        calls: In one step.
        flops: Of all calls.
        seconds: Of all calls, measured alone; None: there is no room.
        tile: Share of computed tiles that is part of the result; None: not a product on an NVIDIA GPU.
        wave: Share of the time in which the multiprocessors have work; None likewise.
        alignment: Bytes that rows are aligned to; None likewise.
    """

    name: str
    what: str
    calls: float
    flops: float
    seconds: float | None
    tile: float | None = None
    wave: float | None = None
    alignment: int | None = None


@dataclass(frozen=True)
class Change:
    """A size that was measured to be faster.

    Attributes:
        name: Of the modules whose products have it.
        kind: "width", "head" or "rows".
        size: As it is.
        other: The faster one.
        seconds: Of all products with it in a step.
        saved: Seconds of them that the other size saves, for the same number of rows.
    """

    name: str
    kind: str
    size: int
    other: int
    seconds: float
    saved: float


@dataclass(frozen=True)
class ShapeAdvice:
    """What was found.

    Attributes:
        device: Where it was measured.
        step: Seconds of a training step.
        lines: Products that take 3 % of it or more, the longest first.
        changes: What would save 3 % of it or more, the most first.
        tried: Sizes that were measured, in words.
        notes: What was not looked at, and why.
        why: Why there is no advice; empty: there is.
    """

    device: str = ""
    step: float = 0.0
    lines: tuple[ProductCost, ...] = ()
    changes: tuple[Change, ...] = ()
    tried: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    why: str = ""


def advise_on_shapes(seconds: float = 20.0) -> ShapeAdvice:
    """Measure the products of the last counted steps of this process, and sizes near theirs.

    Args:
        seconds: How long, about. What was not tried by then is in the notes.

    Returns:
        What was found. A gain is what was saved in three of four rounds or more, and at least 3 % of the step.
    """
    meter = steps.running()
    work = meter.last_work() if meter is not None else None
    if work is None or not work.seconds:
        return ShapeAdvice(
            why="no training steps have been timed: `%distributed tflops on`, then run a cell that trains"
        )
    if not work.products:
        return ShapeAdvice(why="the last steps have no matrix products, or their shapes have not been counted yet")
    try:
        return _Study(work, seconds).result()
    finally:
        trim_malloc()
        if work.device.type == "cuda":
            torch.cuda.empty_cache()


class _Study:
    """The products of some steps, and what is measured of them.

    Args:
        work: What the steps consisted of.
        seconds: How long it may take, about.
    """

    def __init__(self, work: steps.StepWork, seconds: float) -> None:
        self._work, self._device = work, work.device
        self._deadline = time.monotonic() + seconds
        shell = shells.current()
        known = weights(work.parameters, shell.user_ns if shell is not None else {})
        self._flops = sum(calls * product.flops for product, calls in work.products.items())
        self._small = 0.0  # share of the FLOPs in products that are too small to be looked at
        self._placed: dict[Placed, float] = {}
        self._notes: list[str] = []
        self._tried: list[str] = []
        for product, calls in work.products.items():
            share = calls * product.flops / self._flops
            if share < _LOOKED_AT:
                self._small += share
            elif not _can_be_run(product):
                self._notes.append(f"not looked at: products in {product.dtype}")
            else:
                self._placed[placed(product, known)] = calls
        is_nvidia = self._device.type == "cuda" and torch.version.hip is None
        self._multiprocessors = torch.cuda.get_device_properties(self._device).multi_processor_count if is_nvidia else 0

    def result(self) -> ShapeAdvice:
        lines = [self._line(one, calls) for one, calls in self._placed.items()]
        lines.sort(key=lambda line: -(line.seconds or 0.0))
        changes = [change for role in self._roles() if (change := self._best_change(role)) is not None]
        changes.sort(key=lambda change: -change.saved)
        return ShapeAdvice(
            device=peaks.name_of(self._device),
            step=self._work.seconds,
            lines=tuple(line for line in lines if line.seconds is None or line.seconds >= WORTH * self._work.seconds),
            changes=tuple(changes),
            tried=tuple(self._tried),
            notes=tuple(dict.fromkeys([*self._notes, *self._what_is_missing()])),
        )

    def _what_is_missing(self) -> list[str]:
        found = []
        if self._work.counted < 1:
            found.append(f"{percent(1 - self._work.counted)} of the steps have shapes that were not counted")
        if self._work.not_counted:
            found.append(f"not looked at: {', '.join(self._work.not_counted)}")
        if self._small >= WORTH:
            found.append(f"not looked at: products of less than 1 % of the FLOPs, {percent(self._small)} in all")
        return found

    def _line(self, one: Placed, calls: float) -> ProductCost:
        taken = trials.seconds_of(one.product, self._device)
        line = ProductCost(
            _name(one), _words(one.product), calls, calls * one.product.flops, None if taken is None else calls * taken
        )
        if not self._multiprocessors or isinstance(one.product, Attention):
            return line
        tile, wave = sizes.tile_efficiency(one.product), sizes.wave_efficiency(one.product, self._multiprocessors)
        return ProductCost(
            line.name, line.what, calls, line.flops, line.seconds, tile, wave, sizes.alignment(one.product)
        )

    def _roles(self) -> list[Role]:
        """Return the sizes whose products are worth a trial, those with the most FLOPs first."""
        flops: defaultdict[Role, float] = defaultdict(float)
        for one, calls in self._placed.items():
            for role in {role for role in one.roles if role is not None}:
                flops[role] += calls * one.product.flops
        return sorted((role for role in flops if flops[role] >= WORTH * self._flops), key=lambda role: -flops[role])

    def _best_change(self, role: Role) -> Change | None:
        group = {one: calls for one, calls in self._placed.items() if role in one.roles}
        found: list[Change] = []
        for other in self._others(role, list(group)):
            if time.monotonic() > self._deadline:
                self._notes.append(f"not tried, as the time was up: {role.kind} {role.size} -> {other}")
                continue
            change = self._change(role, other, group)
            found += [] if change is None else [change]
        return max(found, key=lambda change: change.saved, default=None)

    def _change(self, role: Role, other: int, group: Mapping[Placed, float]) -> Change | None:
        pairs = [(one.product, with_size(one, role, other), calls) for one, calls in group.items()]
        scale = role.size / other if role.kind == ROWS else 1.0
        left = self._deadline - time.monotonic()
        measured = trials.compare(pairs, scale, self._device, min(_TRIAL, left))
        if measured is None:
            self._notes.append(f"not tried, as there is not enough memory: {role.kind} {role.size} -> {other}")
            return None
        self._tried.append(f"{role.kind} {role.size} -> {other}")
        if measured.surely < WORTH * self._work.seconds:
            return None
        names = ", ".join(dict.fromkeys(map(_name, group)))
        return Change(names, role.kind, role.size, other, measured.now, measured.surely)

    def _others(self, role: Role, group: Sequence[Placed]) -> list[int]:
        """Return the sizes to try in place of one."""
        product = max((one.product for one in group), key=lambda product: product.flops)
        if role.kind == HEAD:
            heads = product.heads if isinstance(product, Attention) else product.batch
            return [width for _, width in sizes.other_heads(heads, role.size)]
        found = sizes.next_sizes(role.size)
        if role.kind == ROWS and self._multiprocessors and isinstance(product, Product):
            found += sizes.next_rows(product, self._multiprocessors)
        return list(dict.fromkeys(found))


def _can_be_run(product: Multiplication) -> bool:
    """Return whether it can be made of random numbers: fp8 and integers need scales, or other operations."""
    kind: Any = getattr(torch, product.dtype)
    return bool(kind.is_floating_point and kind.itemsize > 1)


def _name(one: Placed) -> str:
    if one.weight is not None:
        number = f" ({one.weight.number})" if one.weight.number > 1 else ""
        return one.weight.name + number + (" (shard)" if one.weight.shard else "")
    if isinstance(one.product, Attention):
        return "attention"
    return "products of activations" if one.product.batch > 1 else "a layer" if one.roles[0] else "other products"


def _words(product: Multiplication) -> str:
    if isinstance(product, Attention):
        direction = ", backward" if product.backward else ""
        keys = "" if product.length == product.others else f" by {product.others}"
        return f"{product.batch} x {product.heads} heads of {product.width}, length {product.length}{keys}{direction}"
    several = f"{product.batch} x " if product.batch > 1 else ""
    return f"{several}({product.rows} x {product.inner}) @ ({product.inner} x {product.columns})"
