"""`%distributed advise`: what would make training steps faster, measured on a rank or here, in words."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from nbdist.base.text import counted, duration, flop_rate, percent, table
from nbdist.client.session.session import Session
from nbdist.metrics.node.sample import StepSample

if TYPE_CHECKING:
    from nbdist.metrics.advice.loader_advice import LoaderAdvice
    from nbdist.metrics.advice.shapes import Change, ProductCost, ShapeAdvice

WAITING = 0.1  # share of a step, from which on `%distributed why` measures the DataLoader
_LINES = 12  # of the table
_COMPUTES = 0.9  # share of an item's time, above which it is not worth a word that the rest is waiting
_WORDS = {"width": "width", "head": "head size", "rows": "rows (sequences x length)"}


def rank_to_ask(samples: Mapping[int, StepSample]) -> int | None:
    """Return the rank that waited longest for data, the lowest among equals; None without steps."""
    return max(sorted(samples), key=lambda rank: samples[rank].waiting or 0.0, default=None)


def advise_on(session: Session | None, rank: int, seconds: float) -> str:
    """Measure what would make the last steps faster, and return it in words.

    Args:
        session: Whose rank; None for this process.
        rank: Which one.
        seconds: How long, about.
    """
    from nbdist.metrics.advice.advise import advise

    found = advise(seconds) if session is None else session.call(advise, seconds, ranks=[rank])[0]
    where = "here" if session is None else f"on rank {rank}"
    if found.shapes.why and not found.shapes.step:
        return found.shapes.why
    return "\n\n".join(part for part in (shapes_in_words(found.shapes, where), loaders_in_words(found.loaders)) if part)


def data_advice_on(session: Session | None, rank: int) -> str:
    """Measure the DataLoaders that the last steps waited for, and return in words what would end that."""
    from nbdist.metrics.advice.loader_advice import advise_on_loaders

    found = advise_on_loaders() if session is None else session.call(advise_on_loaders, ranks=[rank])[0]
    return loaders_in_words(found)


# --- shapes


def shapes_in_words(advice: ShapeAdvice, where: str) -> str:
    """Return what the products of a step take, and what other sizes would save.

    Args:
        advice: What was measured.
        where: "here", "on rank 0".
    """
    if advice.why:
        return advice.why
    first = "products that take" if advice.lines else "no product takes"
    lines = [f"{first} 3 % or more of a step of {duration(advice.step)}, measured {where} ({advice.device})"]
    lines += [_table(advice)] if advice.lines else []
    lines += [_change(change, advice.step) for change in advice.changes]
    if not advice.changes:
        tried = f"; measured: {', '.join(advice.tried)}" if advice.tried else ", all sizes are multiples of 64 already"
        lines.append(f"no other size near these saves 3 % of the step{tried}")
    return "\n".join([*lines, *advice.notes])


def _table(advice: ShapeAdvice) -> str:
    has_tiles = any(line.tile is not None for line in advice.lines)
    header = ["module", "product", "calls", "of the step", "rate"] + ["tiles", "waves", "aligned to"] * has_tiles
    rows = [_row(line, advice.step, has_tiles) for line in advice.lines[:_LINES]]
    more = len(advice.lines) - _LINES
    return table(rows, header) + (f"\n... {counted(more, 'more product')}" if more > 0 else "")


def _row(line: ProductCost, step: float, has_tiles: bool) -> list[object]:
    seconds = line.seconds
    share, rate = ("n/a", "n/a") if seconds is None else (percent(seconds / step), flop_rate(line.flops / seconds))
    row: list[object] = [line.name, line.what, f"{line.calls:g}", share, rate]
    if not has_tiles:
        return row
    known = line.tile is not None and line.wave is not None
    return row + ([percent(line.tile or 0), percent(line.wave or 0), f"{line.alignment} B"] if known else ["n/a"] * 3)


def _change(change: Change, step: float) -> str:
    times = change.seconds / max(change.seconds - change.saved, 1e-12)
    return (
        f"{change.name}: {_WORDS[change.kind]} {change.size} -> {change.other}: {times:.2f} x as fast, "
        f"about {percent(change.saved / step)} of the step"
    )


# --- DataLoaders


def loaders_in_words(found: list[LoaderAdvice]) -> str:
    """Return what would end the waiting for DataLoaders; empty if none was waited for."""
    return "\n".join(line for each in found for line in _loader(each))


def _loader(found: LoaderAdvice) -> Iterator[str]:
    yield f"{found.name}: waiting for it takes {percent(found.waiting)} of the step"
    if found.times is None or found.needed is None:
        yield f"  {found.why}"
        return
    yield f"  {', '.join(_times(found))}"
    options = ", ".join(f"{name}={value}" for name, value in found.options)
    workers = counted(found.needed, "worker")
    from nbdist.metrics.advice.loader_advice import SPARE

    wanted = dict(found.options).get("num_workers", found.workers)
    assert isinstance(wanted, int)
    if found.needed <= found.workers:
        yield f"  {workers} should do, and there are {found.workers}: they share their cores, or the storage is slow"
    elif wanted < found.needed:
        yield f"  {workers} would end the waiting, but {_cores(found)}: make an item cheaper, or prepare items ahead"
    if options:
        yield f"  give the DataLoader {options}"
    if max(wanted, found.workers) * found.times.computing > max(found.cores, SPARE):
        yield f"  oversubscribed: {_cores(found)} of each of {counted(found.ranks, 'rank')} here"


def _cores(found: LoaderAdvice) -> str:
    return f"{counted(found.cores, 'core')} left for workers"


def _times(found: LoaderAdvice) -> Iterator[str]:
    assert found.times is not None
    waits = "" if found.times.computing > _COMPUTES else f", {percent(1 - found.times.computing)} of it waiting"
    yield f"an item takes {duration(found.times.item)} (mean of {found.times.items}{waits})"
    yield f"making a batch of them {duration(found.times.collate)}"
    if found.copy is not None and found.pinned_copy is not None:
        yield f"copying it to the GPU {duration(found.copy)}, from pinned memory {duration(found.pinned_copy)}"
