"""Make any DataLoader rank-correct: `prepare_loader`, `skip_first_batches`. Decides how; others do it.

Accelerate's meaning: the batch size is that of each rank, so that the global batch is `batch_size * world_size`.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, Sampler
from torch.utils.data.distributed import DistributedSampler

from nbdist.errors import UsageError
from nbdist.plan import Plan
from nbdist.train import state
from nbdist.train.data.loader import Manner, PreparedLoader
from nbdist.train.data.sharding import Deal, ShardedBatches, ShardedIterable, samplers_of


def prepare_loader(
    loader: DataLoader[Any],
    *,
    plan: Plan | None = None,
    device: torch.device | str | None = None,
    rank: int | None = None,
    world_size: int | None = None,
    sharded: bool = False,
) -> PreparedLoader:
    """Make a loader give each rank its batches, of the size that the loader has, on the rank's device.

    Of a map-style dataset each rank takes every `world_size`-th batch of one order, whatever sampler or batch sampler
    it comes from; it is shuffled again in each epoch, the same on all ranks. Of an iterable dataset each rank and
    worker reads the whole stream and keeps its share; where that is too slow, let the dataset share itself out and
    say `sharded=True`. A DistributedSampler is left as it is, and told the epochs.

    To be called on all ranks; iterating is a collective call, in which ranks agree on the order.

    Args:
        loader: The loader, which stays as it is; one that is prepared already is given back.
        plan: `seed`, `even_batches` and `dispatch` matter; None: the current one.
        device: Where batches go to, copied a batch ahead; None: the current one. On the CPU nothing is copied.
        rank: Which share to take, where that is not this process's rank: the rank among the data-parallel ones. The
            ranks then agree on nothing, so give `Plan(seed=...)`.
        world_size: How many shares there are; goes with `rank`.
        sharded: Whether the data is already another on each rank: it shares itself out, between workers too.

    Returns:
        A DataLoader of the same class, with `end_of_loader`, `batches_left`, `remainder`, `total_batch_size`, `epoch`,
        `state_dict()` and `load_state_dict()`.

    Raises:
        UsageError: It is not a DataLoader, or what was said of it can't be.
    """
    if isinstance(loader, PreparedLoader):
        return loader
    if not isinstance(loader, DataLoader):
        raise UsageError(
            f"prepare_loader takes a torch.utils.data.DataLoader, not {type(loader).__name__}: "
            "put the data into one, for example DataLoader(dataset, batch_size=8)"
        )
    plan = state.current().plan if plan is None else plan
    device = state.current().device if device is None else torch.device(device)
    agrees = rank is None and world_size is None
    rank, world_size = _share(rank, world_size)
    dispatch = plan.dispatch and world_size > 1
    shares = not (sharded or _shares_itself_out(loader))
    if dispatch and not (agrees and shares):
        raise UsageError(
            "with dispatch, rank 0 reads all data for all ranks, but this loader already divides it among ranks: "
            "leave out rank=, sharded=True and DistributedSampler, or plan dispatch=False"
        )
    deal = _deal(loader, rank if shares else 0, world_size if shares else 1, plan.even_batches)
    manner = Manner(
        deal=deal,
        rank=rank,
        world_size=world_size,
        device=device,
        seed=plan.seed if agrees or world_size == 1 else plan.seed or 0,
        agrees=agrees and world_size > 1,
        follows=agrees,
        shares=shares,
        dispatch=dispatch,
        problem=_wrong_sampler(loader, rank, world_size),
    )
    if manner.problem and not manner.agrees:
        raise UsageError(manner.problem)
    source = _source(loader, replace(deal, rank=None) if dispatch else deal, sharded=not shares)
    return PreparedLoader.of(loader, source, manner)


def skip_first_batches(loader: DataLoader[Any], num_batches: int = 0) -> DataLoader[Any]:
    """Return the loader without its first batches, to go on in the middle of an epoch; they are not loaded.

    Epochs are counted together with the loader's own: after one pass over the result, the loader gives the next epoch.

    Args:
        loader: A prepared loader, or any other of a map-style dataset.
        num_batches: How many batches of this rank are left out of each iteration.

    Raises:
        UsageError: It is not a loader of which batches can be skipped, or the number is negative.
    """
    if num_batches < 0:
        raise UsageError(f"num_batches={num_batches} is negative: skip_first_batches(loader, 0) skips nothing")
    if isinstance(loader, PreparedLoader):
        return loader.skipping(num_batches)
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        raise UsageError(
            "skip_first_batches takes a loader that prepare has made, or a DataLoader of a map-style dataset: "
            "type loader = nbdist.prepare(loader) first"
        )
    skipping = copy.copy(loader)
    name = "sampler" if loader.batch_sampler is None else "batch_sampler"
    vars(skipping).update({name: _Skipping(getattr(loader, name), num_batches), "_iterator": None})
    return skipping


class _Skipping(Sampler[Any]):
    """A sampler without the first that another gives."""

    def __init__(self, sampler: Iterable[Any], number: int) -> None:
        self.sampler = sampler
        self._number = number

    def __len__(self) -> int:
        return max(0, len(self.sampler) - self._number)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Any]:
        return itertools.islice(self.sampler, self._number, None)


def _share(rank: int | None, world_size: int | None) -> tuple[int, int]:
    if rank is None and world_size is None:
        return state.data_rank(), state.data_size()
    if rank is None or world_size is None or not 0 <= rank < world_size:
        raise UsageError(
            f"rank={rank} with world_size={world_size} is not a share: give both, for example rank=0, world_size=2, "
            "or neither"
        )
    return rank, world_size


def _deal(loader: DataLoader[Any], rank: int, world_size: int, even: bool) -> Deal:
    batches: Any = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
    size = loader.batch_size if loader.batch_size is not None else getattr(batches, "batch_size", None)
    drop_last = bool(loader.drop_last or getattr(batches, "drop_last", False))
    return Deal(rank, world_size, even, drop_last, size if isinstance(size, int) else None)


def _source(loader: DataLoader[Any], deal: Deal, sharded: bool) -> ShardedBatches | ShardedIterable | None:
    if not isinstance(loader.dataset, IterableDataset):
        batches: Any = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
        return ShardedBatches(batches, deal)
    return None if sharded else ShardedIterable(loader.dataset, deal, shared=loader.num_workers > 0)


def _shares_itself_out(loader: DataLoader[Any]) -> bool:
    """Return whether the data is known to be already another on each rank."""
    if isinstance(loader.dataset, IterableDataset):
        # Set by split_dataset_by_node of Hugging Face's datasets.
        return getattr(loader.dataset, "_distributed", None) is not None
    return _distributed_sampler(loader) is not None


def _distributed_sampler(loader: DataLoader[Any]) -> Any:
    samplers = samplers_of(loader.sampler if loader.batch_sampler is None else loader.batch_sampler)
    for sampler in samplers:
        if isinstance(sampler, DistributedSampler) or (hasattr(sampler, "num_replicas") and hasattr(sampler, "rank")):
            return sampler
    return None


def _wrong_sampler(loader: DataLoader[Any], rank: int, world_size: int) -> str:
    """Return what is wrong with a DistributedSampler; empty if nothing is."""
    sampler = _distributed_sampler(loader)
    if sampler is None or (sampler.rank, sampler.num_replicas) == (rank, world_size):
        return ""
    return (
        f"the loader's {type(sampler).__name__} is made for rank {sampler.rank} of {sampler.num_replicas}, and this is "
        f"rank {rank} of {world_size}: leave it out, because prepare gives each rank its share, or create it again "
        "for this rank"
    )
