"""Loaders in one process, for any rank of any number of ranks: who gets which sample, and what a loader knows."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as some
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, WeightedRandomSampler
from torch.utils.data.distributed import DistributedSampler

from nbdist.plan import Plan
from nbdist.train.data.loaders import prepare_loader
from tests.support.train_data import (
    AnySampler,
    Buckets,
    Draws,
    EpochStream,
    GeneratorStream,
    Numbers,
    ShuffledStream,
    SizedStream,
    Span,
    Stream,
    WorkerStream,
    all_ranks,
    flat,
    lists,
    maker,
    real,
    rounds,
    takes_its_part,
)

# Loops that do nothing with their data do wait for it.
pytestmark = [pytest.mark.filterwarnings("ignore:waiting for data"), pytest.mark.usefixtures("fresh_state")]

sizes = some.integers(0, 40)
batch_sizes = some.integers(1, 6)
world_sizes = some.integers(1, 5)
kinds = some.sampled_from(["sequential", "shuffled", "sampler", "stream", "sized stream"])


def integers(batch: Any) -> list[int]:
    return [int(index) for index in batch]


# --- every sample once


@settings(max_examples=150, deadline=None)
@given(kinds, sizes, batch_sizes, world_sizes)
def test_every_sample_comes_once_and_all_ranks_see_as_many_batches_of_one_size(
    kind: str, size: int, batch_size: int, world_size: int
) -> None:
    loaders = all_ranks(maker(kind, size, batch_size), world_size)
    for _ in range(2):  # epochs
        steps = rounds(loaders)
        assert sorted(real(steps, loaders[0].remainder)) == list(range(size))
        assert len({loader.remainder for loader in loaders}) == 1
        assert all(len(step) == world_size for step in steps)
        if world_size > 1:
            assert {len(batch) for step in steps for batch in step} <= {batch_size}


@settings(max_examples=80, deadline=None)
@given(kinds, sizes, batch_sizes, world_sizes)
def test_uneven_tails_have_every_sample_once_and_nothing_else(
    kind: str, size: int, batch_size: int, world_size: int
) -> None:
    loaders = all_ranks(maker(kind, size, batch_size), world_size, Plan(seed=0, even_batches=False))
    assert sorted(flat(rounds(loaders))) == list(range(size))


@settings(max_examples=80, deadline=None)
@given(kinds, sizes, batch_sizes, world_sizes, some.booleans())
def test_drop_last_drops_the_last_incomplete_batch_of_all_ranks(
    kind: str, size: int, batch_size: int, world_size: int, even: bool
) -> None:
    plan = Plan(seed=0, even_batches=even)
    steps = rounds(all_ranks(maker(kind, size, batch_size, drop_last=True), world_size, plan))
    together = batch_size * world_size
    assert [len(flat(step)) for step in steps] == [together] * (size // together)
    assert len(set(flat(steps))) == len(flat(steps))


@settings(max_examples=80, deadline=None)
@given(kinds, sizes, batch_sizes, world_sizes)
def test_ranks_together_see_what_one_rank_sees_with_the_whole_batch(
    kind: str, size: int, batch_size: int, world_size: int
) -> None:
    loaders = all_ranks(maker(kind, size, batch_size), world_size)
    (alone,) = all_ranks(maker(kind, size, batch_size * world_size), 1)
    steps, whole = rounds(loaders), lists(alone)
    assert [flat(step) for step in steps[:-1]] == whole[:-1]
    assert real(steps, loaders[0].remainder) == flat(whole)


@settings(max_examples=80, deadline=None)
@given(kinds, sizes, batch_sizes, world_sizes, some.booleans(), some.booleans())
def test_the_loader_knows_its_length_and_when_it_ends(
    kind: str, size: int, batch_size: int, world_size: int, even: bool, drop_last: bool
) -> None:
    plan = Plan(seed=0, even_batches=even)
    for loader in all_ranks(maker(kind, size, batch_size, drop_last), world_size, plan):
        seen = [(loader.end_of_loader, loader.batches_left) for _ in loader]
        assert [end for end, _ in seen] == [False] * (len(seen) - 1) + [True] * bool(seen)
        if kind == "stream":
            assert {left for _, left in seen[:-1]} <= {None}
        else:
            assert len(loader) == len(seen)
            assert [left for _, left in seen] == list(reversed(range(len(seen))))
        assert loader.total_batch_size == batch_size * world_size


@pytest.mark.parametrize("sizes", [(3, 1, 4, 2, 5), (3, 1, 4, 2), (7,)])
def test_batches_of_other_sizes_are_dealt_out_whole(sizes: tuple[int, ...]) -> None:
    loaders = all_ranks(lambda: DataLoader(Numbers(sum(sizes)), batch_sampler=Buckets(*sizes)), 2)
    steps = rounds(loaders)
    assert real(steps, loaders[0].remainder) == list(range(sum(sizes)))
    assert all(len(step) == 2 for step in steps)
    assert loaders[0].total_batch_size is None


def test_a_short_batch_in_the_middle_is_not_taken_for_the_last() -> None:
    buckets = Buckets(2, 1, 2, 2)
    buckets.batch_size = 2
    loaders = all_ranks(lambda: DataLoader(Numbers(7), batch_sampler=buckets), 2)
    assert rounds(loaders) == [[[0, 1], [2]], [[3, 4], [5, 6]]]


def test_a_short_batch_in_the_last_round_leaves_what_is_real_first() -> None:
    buckets = Buckets(2, 2, 1, 2)
    buckets.batch_size = 2
    loaders = all_ranks(lambda: DataLoader(Numbers(7), batch_sampler=buckets), 2)
    assert real(rounds(loaders), loaders[0].remainder) == list(range(7))


@pytest.mark.parametrize("kind", [tuple, numpy.array, torch.tensor])
def test_batches_of_indices_may_be_arrays(kind: Callable[[Any], Any]) -> None:
    batches = [kind(part) for part in (range(3), range(3, 6), range(6, 7))]
    loaders = all_ranks(lambda: DataLoader(Numbers(7), batch_sampler=batches, collate_fn=integers), 2)
    assert real(rounds(loaders), loaders[0].remainder) == list(range(7))


def test_a_sampler_of_batches_without_automatic_batching_is_shared_out() -> None:
    class Rows(Numbers):
        def __getitem__(self, index: Any) -> Any:
            return torch.tensor(index)

    sampler = BatchSampler(RandomSampler(range(11)), 2, False)
    loaders = all_ranks(lambda: DataLoader(Rows(11), sampler=sampler, batch_size=None), 2)
    steps = rounds(loaders)
    assert sorted(real(steps, loaders[0].remainder)) == list(range(11))
    assert loaders[0].total_batch_size == 4


@pytest.mark.parametrize("kind", ["map", "stream"])
def test_ready_batches_are_dealt_out_one_by_one(kind: str) -> None:
    data: Any = Numbers(5) if kind == "map" else Stream(5)
    assert rounds(all_ranks(lambda: DataLoader(data, batch_size=None), 2)) == [[0, 1], [2, 3], [4, 0]]


def test_weighted_samples_are_drawn_alike() -> None:
    def make() -> DataLoader[Any]:
        return DataLoader(Numbers(9), batch_size=2, sampler=WeightedRandomSampler([0.0, 1.0, 1.0] * 3, 8))

    first, second = all_ranks(make, 2)
    (alone,) = all_ranks(make, 1)
    assert [batch for pair in zip(lists(first), lists(second), strict=True) for batch in pair] == lists(alone)


# --- the order


def test_each_epoch_has_an_order_of_its_own_that_its_number_gives() -> None:
    (loader,) = all_ranks(maker("shuffled", 20, 4), 1)
    epochs = [lists(loader) for _ in range(3)]
    assert len({str(epoch) for epoch in epochs}) == 3
    assert loader.epoch == 3
    loader.set_epoch(1)
    assert lists(loader) == epochs[1]


def test_an_iteration_that_was_broken_off_is_followed_by_the_next_epoch() -> None:
    (loader,) = all_ranks(maker("shuffled", 20, 4), 1)
    first = next(iter(loader)).tolist()
    assert lists(loader)[0] != first
    assert loader.epoch == 2


@pytest.mark.parametrize("kind", ["shuffled", "sampler", "shuffled stream"])
def test_loading_moves_no_global_generator(kind: str) -> None:
    (loader,) = all_ranks(maker(kind, 20, 4), 1)
    lists(loader)  # the seed of a loader without one is drawn once
    before = torch.get_rng_state(), random.getstate(), numpy.random.get_state(legacy=False)
    lists(loader)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]
    assert str(numpy.random.get_state(legacy=False)) == str(before[2])


def test_without_a_plan_s_seed_the_order_follows_manual_seed() -> None:
    orders = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        orders.append(lists(prepare_loader(maker("shuffled", 20, 4)(), plan=Plan())))
    assert orders[0] == orders[1] != orders[2]


def test_a_generator_of_the_user_s_is_gone_on_with() -> None:
    def orders() -> list[Any]:
        generator = torch.Generator().manual_seed(5)
        loader = prepare_loader(DataLoader(Numbers(20), batch_size=4, shuffle=True, generator=generator), plan=Plan())
        return [lists(loader), lists(loader)]

    first, second = orders()
    assert [first, second] == orders()
    assert first != second


def test_set_epoch_is_called_on_the_dataset_and_on_samplers() -> None:
    class Told(AnySampler):
        epochs: list[int]

        def set_epoch(self, epoch: int) -> None:
            self.epochs = [*getattr(self, "epochs", []), epoch]

    dataset, sampler = Numbers(6), Told(6)
    loader = prepare_loader(DataLoader(dataset, batch_size=2, sampler=sampler), plan=Plan())
    lists(loader), lists(loader)
    assert dataset.epochs == sampler.epochs == [0, 1]


def test_a_distributed_sampler_is_left_alone_and_told_the_epochs() -> None:
    sampler: DistributedSampler[Any] = DistributedSampler(Numbers(10), num_replicas=2, rank=1, seed=3)
    loader = prepare_loader(DataLoader(Numbers(10), batch_size=2, sampler=sampler), plan=Plan(), rank=1, world_size=2)
    for epoch in range(2):
        found = flat(lists(loader))
        sampler.set_epoch(epoch)
        assert found == list(sampler)
    assert loader.remainder == -1


def test_an_epoch_that_the_user_tells_a_distributed_sampler_is_believed() -> None:
    sampler: DistributedSampler[Any] = DistributedSampler(Numbers(10), num_replicas=1, rank=0)
    loader = prepare_loader(DataLoader(Numbers(10), batch_size=2, sampler=sampler), plan=Plan())
    sampler.set_epoch(7)
    expected = list(sampler)
    assert flat(lists(loader)) == expected
    assert loader.epoch == 8


# --- iterable datasets and workers


@pytest.mark.torch_private
@pytest.mark.parametrize("dataset", [Stream, WorkerStream, ShuffledStream, SizedStream])
def test_the_order_of_a_stream_does_not_depend_on_the_number_of_workers(dataset: type[Stream]) -> None:
    found = []
    for workers in (0, 1, 2):

        def make(count: int = workers) -> DataLoader[Any]:
            return DataLoader(dataset(19), 2, num_workers=count)

        loaders = all_ranks(make, 2)
        steps = rounds(loaders)
        assert sorted(real(steps, loaders[1].remainder)) == list(range(19))
        found.append((steps, loaders[0].remainder))
    assert found[0] == found[1] == found[2]


@pytest.mark.torch_private
@pytest.mark.parametrize("workers", [0, 2])
def test_a_stream_is_told_the_epoch_even_in_persistent_workers(workers: int) -> None:
    loader = prepare_loader(
        DataLoader(EpochStream(4), 2, num_workers=workers, persistent_workers=workers > 0), plan=Plan()
    )
    assert [lists(loader) for _ in range(3)] == [[[epoch] * 2] * 2 for epoch in range(3)]


@pytest.mark.torch_private
def test_a_stream_that_worker_init_fn_shares_out_is_seen_whole() -> None:
    """As the documentation of torch shows it."""
    loaders = all_ranks(lambda: DataLoader(Span(1, 12), 2, num_workers=2, worker_init_fn=takes_its_part), 2)
    assert sorted(real(rounds(loaders), loaders[0].remainder)) == list(range(1, 12))


@pytest.mark.torch_private
def test_even_batches_can_be_changed_for_persistent_workers() -> None:
    loaders = all_ranks(lambda: DataLoader(Stream(5), 2, num_workers=1, persistent_workers=True), 2)
    assert rounds(loaders) == [[[0, 1], [2, 3]], [[4, 0], [0, 1]]]
    for loader in loaders:
        loader.even_batches = False
    assert rounds(loaders) == [[[0, 1], [2, 3]], [[4]]]


def test_a_stream_s_generator_is_seeded_alike_and_anew_in_each_epoch() -> None:
    loaders = all_ranks(lambda: DataLoader(GeneratorStream(12), 2), 2)
    first, second = rounds(loaders), rounds(loaders)
    assert sorted(flat(first)) == sorted(flat(second)) == list(range(12))
    assert first != second


def test_a_dataset_that_shares_itself_out_is_left_alone() -> None:
    loaders = all_ranks(lambda: DataLoader(Stream(3), 2), 2, sharded=True)
    assert [lists(loader) for loader in loaders] == [[[0, 1], [2]]] * 2
    assert loaders[0].total_batch_size == 4


def test_a_hugging_face_stream_that_was_split_by_node_is_left_alone() -> None:
    stream: Any = Stream(3)
    stream._distributed = object()
    assert lists(prepare_loader(DataLoader(stream, 3), plan=Plan(), rank=1, world_size=2)) == [[0, 1, 2]]


def test_workers_draw_other_numbers_on_each_rank_and_in_each_epoch_but_the_same_in_each_run() -> None:
    def draws() -> list[Any]:
        loaders = all_ranks(lambda: DataLoader(Draws(), 2, num_workers=2), 2)
        return [flat(rounds(loaders)), flat(rounds(loaders))]

    first, second = draws()
    assert len({*first, *second}) == 16
    assert [first, second] == draws()
