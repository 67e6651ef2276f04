"""How long a DataLoader's dataset takes for an item, and its collate function for a batch: measured in a fork.

Whatever the dataset changes by being read (its own random numbers, positions, counters, caches) ends with the fork, as
it does in a DataLoader's worker. The fork reads items that it draws itself, so no sampler is asked.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import statistics
import sys
import time
import warnings
from multiprocessing.connection import Connection
from typing import Any

import msgspec
import torch
from torch.utils.data import DataLoader

from nbdist.base import trees
from nbdist.metrics.events.loader_source import LoaderSource

Source = DataLoader[Any] | LoaderSource

_ITEMS = 256  # at most
_LEAST = 3
_COLLATED = 3  # times


class ItemTimes(msgspec.Struct, frozen=True):
    """What was measured, with one thread as in a worker.

    Attributes:
        items: How many were read.
        item: Seconds of one, mean.
        slowest: Seconds of the slowest.
        typical: Seconds of one in the middle.
        computing: Share of the time in which a processor was at work; the rest is waiting, for a disk or a network.
        collate: Seconds that making a batch of items takes.
        batch: Bytes of a batch's tensors.
        why: What went wrong; empty: nothing, and all of the above is known.
    """

    items: int = 0
    item: float = 0.0
    slowest: float = 0.0
    typical: float = 0.0
    computing: float = 1.0
    collate: float = 0.0
    batch: int = 0
    why: str = ""


def measure_items(loader: Source, batch_size: int, seconds: float = 2.0) -> ItemTimes:
    """Measure a slice of a DataLoader's dataset, which must be one with a length and items by number.

    Args:
        loader: Whose; nothing of it changes.
        batch_size: Items of a batch.
        seconds: How long items are read; one that takes longer is waited for, up to ten times as long.
    """
    context = multiprocessing.get_context("fork")
    receiving, sending = context.Pipe(duplex=False)
    child = context.Process(target=_measure, args=(loader, batch_size, seconds, sending), daemon=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # a fork beside threads, which workers are too
        child.start()
    sending.close()
    try:
        if not receiving.poll(10 * seconds):
            return ItemTimes(why=f"{_LEAST} items took more than {10 * seconds:.0f} s")
        return msgspec.msgpack.decode(receiving.recv_bytes(), type=ItemTimes)
    except EOFError:
        child.join()
        return ItemTimes(why=f"the process that read items has ended with exit code {child.exitcode}")
    finally:
        receiving.close()
        child.kill()
        child.join()


def _measure(loader: Source, batch_size: int, seconds: float, sending: Connection) -> None:
    """Read items, make batches, and send what that took. In the fork."""
    _be_silent()
    torch.set_num_threads(1)
    try:
        found = _times_of(loader, batch_size, seconds)
    except Exception as error:  # the dataset is the user's; its error is the answer
        found = ItemTimes(why=f"reading an item in another process raised {type(error).__name__}: {error}"[:200])
    sending.send_bytes(msgspec.msgpack.encode(found))


def _times_of(loader: Source, batch_size: int, seconds: float) -> ItemTimes:
    dataset: Any = loader.dataset
    numbers = random.Random(0).sample(range(len(dataset)), min(len(dataset), max(_ITEMS, batch_size)))
    together = getattr(dataset, "__getitems__", None)
    items: list[Any] = []
    taken: list[float] = []
    processor, deadline = time.process_time(), time.perf_counter() + seconds
    while numbers and (len(taken) < _LEAST or time.perf_counter() < deadline):
        chunk, numbers = (numbers[:batch_size], numbers[batch_size:]) if together else (numbers[:1], numbers[1:])
        began = time.perf_counter()
        read = together(chunk) if together else [dataset[chunk[0]]]
        taken += [(time.perf_counter() - began) / len(chunk)] * len(chunk)
        items += read
    processor = time.process_time() - processor
    batch = [items[number % len(items)] for number in range(batch_size)]
    collating, made = [], None
    for _ in range(_COLLATED):
        began = time.perf_counter()
        made = loader.collate_fn(
            batch if loader.batch_size is not None or loader.batch_sampler is not None else batch[0]
        )
        collating.append(time.perf_counter() - began)
    tensors = (leaf for leaf in trees.leaves(made) if isinstance(leaf, torch.Tensor))
    return ItemTimes(
        items=len(taken),
        item=statistics.fmean(taken),
        slowest=max(taken),
        typical=statistics.median(taken),
        computing=min(1.0, processor / max(sum(taken), 1e-9)),
        collate=statistics.median(collating),
        batch=sum(tensor.nbytes for tensor in tensors),
    )


def _be_silent() -> None:
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(nowhere, stream)
    sys.stdout = sys.stderr = open(nowhere, "w")  # noqa: SIM115 - until the fork ends
