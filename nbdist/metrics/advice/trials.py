"""Runs products of given sizes and times them, one beside another. The random numbers of training are not drawn from.

Independent of sizes.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F

from nbdist.metrics.compute.products import Attention, Multiplication, Product
from nbdist.metrics.node import host
from nbdist.metrics.rates import timing

_ROUNDS, _FEWER = 9, 3
_SHORT = 0.0005  # seconds, below which several runs are timed as one
_MOST_AT_ONCE = 200  # runs
_SPARE = 2  # times what a trial needs must be free


class Comparison(NamedTuple):
    """What was measured of products as they are, and of others in their place.

    Attributes:
        now: Seconds of all calls, median.
        then: Of the others.
        surely: Seconds that were saved in three of four rounds, or more.
    """

    now: float
    then: float
    surely: float


def seconds_of(product: Multiplication, device: torch.device) -> float | None:
    """Return how long one takes, the median of several runs; None where there is no room for it."""
    if not _has_room(product, device=device):
        return None
    run = _runner(product, device)
    times = _times(run, device)
    return statistics.median(timing.once(run, device, times) for _ in range(5))


def compare(
    pairs: Sequence[tuple[Multiplication, Multiplication, float]], scale: float, device: torch.device, seconds: float
) -> Comparison | None:
    """Measure products beside others, in turns, so that what else the machine does strikes both.

    Args:
        pairs: A product, the other in its place, and how often they run in a step.
        scale: What a second of the others counts for: less than one if they do more of what is to be done.
        device: Where.
        seconds: How long, about; three rounds are made at least.

    Returns:
        What was measured; None where there is no room for it.
    """
    rounds: list[list[tuple[float, float]]] = []
    for now, then, calls in pairs:
        if not _has_room(now, then, device=device):
            return None
        first, second = _runner(now, device), _runner(then, device)
        times = _times(first, device)
        timing.once(second, device, times)
        in_turns: list[tuple[float, float]] = []
        began = time.monotonic()
        while len(in_turns) < _FEWER or (len(in_turns) < _ROUNDS and time.monotonic() - began < seconds / len(pairs)):
            in_turns.append((timing.once(first, device, times), timing.once(second, device, times)))
        rounds.append([(calls * one, calls * scale * other) for one, other in in_turns])
        del first, second  # with their memory
    saved = [_lower_quartile([one - other for one, other in each]) for each in rounds]
    now_, then_ = (sum(statistics.median(pair[side] for pair in each) for each in rounds) for side in (0, 1))
    return Comparison(now_, then_, sum(saved))


def _lower_quartile(values: Sequence[float]) -> float:
    return sorted(values)[len(values) // 4]


def _times(run: Callable[[], object], device: torch.device) -> int:
    """Return how many runs to time as one, after one to get warm."""
    run()
    taken = timing.once(run, device)
    return min(_MOST_AT_ONCE, max(1, round(_SHORT / taken))) if taken > 0 else 1


def _runner(product: Multiplication, device: torch.device) -> Callable[[], object]:
    """Return what runs it once, with numbers of its own."""
    make = functools.partial(_numbers, dtype=getattr(torch, product.dtype), device=device)
    if isinstance(product, Product):
        left = _laid_out(make, product.batch, product.rows, product.inner, product.left_transposed)
        right = _laid_out(make, product.batch, product.inner, product.columns, product.right_transposed)
        return _without_autograd(functools.partial(torch.matmul, left, right))
    query = make(product.batch, product.heads, product.length, product.width)
    key = make(product.batch, product.kv_heads, product.others, product.width)
    value = make(product.batch, product.kv_heads, product.others, product.value_width)
    attend = functools.partial(_attend, query, key, value, product)
    if not product.backward:
        return _without_autograd(attend)
    with torch.enable_grad():
        inputs = [tensor.requires_grad_() for tensor in (query, key, value)]
        out = attend()
    return functools.partial(torch.autograd.grad, out, inputs, torch.ones_like(out), retain_graph=True)


def _attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, product: Attention) -> torch.Tensor:
    if product.heads != product.kv_heads:
        return F.scaled_dot_product_attention(query, key, value, is_causal=product.causal, enable_gqa=True)
    return F.scaled_dot_product_attention(query, key, value, is_causal=product.causal)


def _without_autograd(run: Callable[[], object]) -> Callable[[], object]:
    def quietly() -> object:
        with torch.no_grad():
            return run()

    return quietly


def _laid_out(make: Callable[..., torch.Tensor], batch: int, rows: int, columns: int, by_columns: bool) -> torch.Tensor:
    shape = (columns, rows) if by_columns else (rows, columns)
    made = make(batch, *shape) if batch > 1 else make(*shape)
    return made.transpose(-1, -2) if by_columns else made


def _numbers(*shape: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    generator = torch.Generator(device).manual_seed(0)
    return torch.empty(shape, dtype=dtype, device=device).uniform_(-1, 1, generator=generator)


def _has_room(*products: Multiplication, device: torch.device) -> bool:
    if device.type == "cuda":
        free = torch.cuda.mem_get_info(device)[0]
    else:
        whole, used = host.memory()
        free = whole - used
    return _SPARE * sum(map(_bytes, products)) <= free


def _bytes(product: Multiplication) -> int:
    item = torch.empty(0, dtype=getattr(torch, product.dtype)).itemsize
    if isinstance(product, Product):
        rows, inner, columns = product.sizes
        return item * product.batch * (rows * inner + inner * columns + rows * columns)
    each = product.width + product.value_width
    tensors = item * product.batch * product.heads * (product.length + product.others) * each
    return 3 * tensors if product.backward else tensors
