"""What would end a loop's waiting for data: how many workers, and which options, computed from what was measured.

For any DataLoader that steps took batches from, prepared or not. Its iterators, samplers and random numbers are left
alone: items are read in a fork, copies made of memory of our own.
"""

from __future__ import annotations

import gc
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from nbdist import shells
from nbdist.metrics import steps
from nbdist.metrics.advice.item_times import ItemTimes, Source, measure_items
from nbdist.metrics.events.loading import LoaderKey, LoaderUse
from nbdist.metrics.node import host
from nbdist.metrics.rates import timing

WORTH = 0.03  # share of a step spent waiting
_UNEVEN = 4.0  # times an item in the middle, from which on a slow one is worth more batches read ahead
_AHEAD = 4  # batches for each worker
SPARE = 0.25  # of a core, that workers may take where none is left for them: training does not keep its own busy always
_COPY_WORTH = 0.01  # share of a step
_GONE = (
    "its dataset no longer exists, and only small ones without files or GPU memory are kept; keep it in a variable, "
    "then run the cell again"
)


@dataclass(frozen=True)
class LoaderAdvice:
    """What was found about one DataLoader.

    Attributes:
        name: The user's variable, or what it reads.
        waiting: Share of a step spent waiting for it.
        step: Seconds of a training step.
        batches: That a step takes.
        workers: That it has.
        cores: Left for its workers: this rank's share of the machine, without the core that trains.
        ranks: On this machine.
        times: What was measured.
        copy: Seconds to copy a batch to the GPU from ordinary memory; None: there is no GPU.
        pinned_copy: Likewise from pinned memory.
        needed: Workers that would end the waiting; None: not computed.
        options: What to give the DataLoader: {"num_workers": 6}.
        why: Why nothing was measured; empty: it was.
    """

    name: str
    waiting: float = 0.0
    step: float = 0.0
    batches: float = 0.0
    workers: int = 0
    cores: int = 1
    ranks: int = 1
    times: ItemTimes | None = None
    copy: float | None = None
    pinned_copy: float | None = None
    needed: int | None = None
    options: tuple[tuple[str, object], ...] = ()
    why: str = ""


def advise_on_loaders(seconds: float = 2.0) -> list[LoaderAdvice]:
    """Measure the DataLoaders of this process's last steps that were waited for.

    Args:
        seconds: How long the items of each are read.

    Returns:
        One for each that took 3 % of the steps' time or more, the longest wait first.
    """
    meter = steps.running()
    work = meter.last_work() if meter is not None else None
    if work is None or not work.seconds:
        return []
    whole = sum(use.seconds for use in work.loaders.values())
    shares = {key: (work.waiting or 0.0) * use.seconds / whole for key, use in work.loaders.items() if whole}
    waited = sorted((key for key in shares if shares[key] >= WORTH), key=lambda key: -shares[key])
    return [_advice(key, work.loaders[key], shares[key], work, seconds) for key in waited]


def _advice(key: LoaderKey, use: LoaderUse, share: float, work: steps.StepWork, seconds: float) -> LoaderAdvice:
    source = _source_of(key, use)
    if source is None:
        return LoaderAdvice("a DataLoader", share, why=_GONE)
    name = _name(source, key)
    if isinstance(source.dataset, IterableDataset) or not hasattr(source.dataset, "__len__"):
        return LoaderAdvice(name, share, why="not measured: reading an iterable dataset would move its position")
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    times = measure_items(source, key.batch_size or 1, seconds)
    if times.why:
        return LoaderAdvice(name, share, why=times.why)
    copy, pinned = _copies(times.batch, work.device)
    found = LoaderAdvice(
        name=name,
        waiting=share,
        step=work.seconds,
        batches=use.batches / work.made,
        workers=key.workers,
        cores=cores_for_workers(host.cores(), ranks, _is_bound()),
        ranks=ranks,
        times=times,
        copy=copy,
        pinned_copy=pinned,
    )
    return with_options(found, key.batch_size or 1, _options_of(source))


def with_options(found: LoaderAdvice, batch_size: int, has: Mapping[str, Any]) -> LoaderAdvice:
    """Return what was found, with the workers that are needed and the options to give.

    A worker makes a batch in `batch_size` x item + collate seconds. The batches of a step must come while it computes,
    which is the step without its waiting.

    Args:
        found: Without them.
        batch_size: Items of a batch.
        has: Options that the DataLoader has.
    """
    assert found.times is not None
    batch = batch_size * found.times.item + found.times.collate
    computing = max(found.step * (1 - found.waiting), 1e-6)
    needed = max(1, math.ceil(found.batches * batch / computing))
    options: dict[str, object] = {}
    workers = min(needed, workers_that_fit(found.cores, found.times.computing))
    if workers > found.workers:
        options["num_workers"] = workers
    if not has["persistent_workers"] and (found.workers or "num_workers" in options):
        options["persistent_workers"] = True
    if found.times.slowest > _UNEVEN * found.times.typical and (has["prefetch_factor"] or 2) < _AHEAD:
        options["prefetch_factor"] = _AHEAD
    if found.copy is not None and found.pinned_copy is not None and not has["pin_memory"]:
        saved = found.batches * (found.copy - found.pinned_copy)
        options |= {"pin_memory": True} if saved >= _COPY_WORTH * found.step else {}
    fields = {name: getattr(found, name) for name in found.__dataclass_fields__}
    return LoaderAdvice(**fields | {"needed": needed, "options": tuple(options.items())})


def workers_that_fit(cores: int, computing: float) -> int:
    """Return how many workers keep no more than these cores busy: more than cores, if items mostly wait for storage."""
    return max(1, int(max(cores, SPARE) / max(computing, 0.01)))


def cores_for_workers(cores: int, ranks: int, is_bound: bool) -> int:
    """Return the cores left for a rank's workers.

    Args:
        cores: That the process may use.
        ranks: On this machine.
        is_bound: Whether these cores are the rank's own already.
    """
    return max(0, (cores if is_bound else cores // ranks) - 1)


def _is_bound() -> bool:
    """Return whether this process has fewer cores than the one that has started it."""
    try:
        return len(os.sched_getaffinity(0)) < len(os.sched_getaffinity(os.getppid()))
    except (OSError, AttributeError):
        return False


def _source_of(key: LoaderKey, use: LoaderUse) -> Source | None:
    """Return what the batches came from; None if it is gone."""
    known = use.reference.source() if use.reference is not None else None
    if use.reference is not None and use.reference.has_ended:
        return None
    return known if known is not None else next((loader for loader in _loaders() if _is_of(loader, key)), None)


def _loaders() -> Iterator[DataLoader[Any]]:
    """Yield the DataLoaders that exist. Walks all objects: 0.1 s or more."""
    objects: Iterable[Any] = gc.get_objects()
    return (found for found in objects if issubclass(type(found), DataLoader))


def _is_of(loader: DataLoader[Any], key: LoaderKey) -> bool:
    return (id(loader.dataset), id(loader.collate_fn), loader.num_workers) == (key.dataset, key.collate, key.workers)


def _name(source: Source, key: LoaderKey) -> str:
    shell = shells.current()
    names = shell.user_ns.items() if shell is not None else ()
    loaders = ((name, value) for name, value in names if issubclass(type(value), DataLoader) and name[:1] != "_")
    variable = next((name for name, loader in loaders if _is_of(loader, key)), None)
    return variable or f"DataLoader of {type(source.dataset).__name__}"


def _options_of(source: Source) -> dict[str, Any]:
    return {name: getattr(source, name, None) for name in ("persistent_workers", "prefetch_factor", "pin_memory")}


def _copies(size: int, device: torch.device) -> tuple[float | None, float | None]:
    """Return the seconds to copy so many bytes to a device, from ordinary and pinned memory; None without a GPU."""
    if device.type != "cuda" or not size:
        return None, None
    source, target = torch.empty(size, dtype=torch.uint8), torch.empty(size, dtype=torch.uint8, device=device)
    pinned = source.pin_memory()
    return tuple(timing.median(lambda memory=memory: target.copy_(memory), device, 0.05) for memory in (source, pinned))  # type: ignore[return-value, misc]
