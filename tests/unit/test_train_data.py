"""Loaders in one process, for any rank of any number of ranks: who gets which sample, and what a loader knows."""

from __future__ import annotations

import pickle
import random
import time
from collections import OrderedDict, UserDict, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as some
from torch.utils.data import BatchSampler, DataLoader, Dataset, RandomSampler, WeightedRandomSampler
from torch.utils.data.distributed import DistributedSampler

from nbdist.errors import UsageError
from nbdist.plan import Plan
from nbdist.train import state
from nbdist.train.batches import map_tensors
from nbdist.train.data import prepare_loader, skip_first_batches
from nbdist.train.feed import LoadingWatch
from tests.train_data import (
    AnySampler,
    Buckets,
    Draws,
    EpochStream,
    GeneratorStream,
    Numbers,
    Pair,
    ShuffledStream,
    SizedStream,
    Stream,
    WorkerStream,
    all_ranks,
    flat,
    lists,
    real,
    rounds,
)

# Loops that do nothing with their data do wait for it.
pytestmark = pytest.mark.filterwarnings("ignore:waiting for data")

sizes = some.integers(0, 40)
batch_sizes = some.integers(1, 6)
world_sizes = some.integers(1, 5)
kinds = some.sampled_from(["sequential", "shuffled", "sampler", "stream", "sized stream"])


@pytest.fixture(autouse=True)
def fresh_state() -> Iterator[None]:
    state.begin(Plan())
    yield
    state.forget()


def maker(kind: str, size: int, batch_size: int, drop_last: bool = False, workers: int = 0) -> Callable[[], Any]:
    data: dict[str, Callable[[], dict[str, Any]]] = {
        "sequential": lambda: {"dataset": Numbers(size)},
        "shuffled": lambda: {"dataset": Numbers(size), "shuffle": size > 0},
        "sampler": lambda: {"dataset": Numbers(size), "sampler": AnySampler(size)},
        "stream": lambda: {"dataset": Stream(size)},
        "sized stream": lambda: {"dataset": SizedStream(size)},
        "shuffled stream": lambda: {"dataset": ShuffledStream(size)},
    }
    return lambda: DataLoader(**data[kind](), batch_size=batch_size, drop_last=drop_last, num_workers=workers)


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
        loaders = all_ranks(lambda workers=workers: DataLoader(dataset(19), 2, num_workers=workers), 2)
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


# --- going on in the middle


@settings(max_examples=80, deadline=None)
@given(kinds, some.integers(1, 40), batch_sizes, world_sizes, some.data())
def test_a_resume_gives_what_had_been_left_and_then_the_next_epoch(
    kind: str, size: int, batch_size: int, world_size: int, data: some.DataObject
) -> None:
    make = maker(kind, size, batch_size)
    loaders, fresh = all_ranks(make, world_size), all_ranks(make, world_size)
    rounds(loaders)
    iterators = [iter(loader) for loader in loaders]
    stop = data.draw(some.integers(0, -(-size // (batch_size * world_size))))
    for iterator in iterators:
        for _ in range(stop):
            next(iterator)
    for loader, other in zip(loaders, fresh, strict=True):
        if stop:
            other.load_state_dict(pickle.loads(pickle.dumps(loader.state_dict())))
        else:
            other.set_epoch(1)
    rest = [[batch.tolist() for batch in iterator] for iterator in iterators]
    assert [lists(other) for other in fresh] == rest
    assert fresh[0].epoch == 2
    assert [lists(other) for other in fresh] == [lists(loader) for loader in loaders]


@settings(max_examples=60, deadline=None)
@given(kinds, some.integers(20, 60), some.integers(1, 3), world_sizes, world_sizes, some.integers(1, 3))
def test_a_resume_with_other_ranks_still_gives_every_sample_once(
    kind: str, size: int, batch_size: int, before: int, after: int, steps: int
) -> None:
    loaders = all_ranks(maker(kind, size, batch_size), before)
    iterators = [iter(loader) for loader in loaders]
    count = min(steps, (size - 1) // (batch_size * before))
    seen = [next(iterator).tolist() for _ in range(count) for iterator in iterators]
    others = all_ranks(maker(kind, size, batch_size), after)
    for other in others:
        other.load_state_dict(loaders[0].state_dict())
    assert sorted(flat(seen) + real(rounds(others), others[0].remainder)) == list(range(size))


def test_what_lies_before_the_place_is_not_loaded() -> None:
    dataset = Numbers(20)
    loader = prepare_loader(DataLoader(dataset, 2), plan=Plan())
    loader.load_state_dict({**loader.state_dict(), "batches": 8})
    assert lists(loader) == [[16, 17], [18, 19]]
    assert dataset.read == 4


def test_a_state_of_the_last_batch_has_nothing_left_of_its_epoch() -> None:
    (loader,) = all_ranks(maker("shuffled", 8, 2), 1)
    states = [loader.state_dict() for _ in loader]
    loader.load_state_dict(states[-1])
    assert (lists(loader), loader.epoch) == ([], 1)


def test_a_loader_with_a_generator_of_the_user_s_resumes_with_its_order() -> None:
    def make(seed: int) -> Any:
        generator = torch.Generator().manual_seed(seed)
        return prepare_loader(DataLoader(Numbers(20), 4, shuffle=True, generator=generator), plan=Plan())

    loader, other = make(1), make(2)
    iterator = iter(loader)
    next(iterator)
    other.load_state_dict(loader.state_dict())
    assert lists(other) == [batch.tolist() for batch in iterator]


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
def test_a_stateful_loader_shuffles_as_the_plan_s_seed_says() -> None:
    from torchdata.stateful_dataloader import StatefulDataLoader

    loaders = all_ranks(lambda: StatefulDataLoader(Numbers(12), 2, shuffle=True), 2)
    first, second = rounds(loaders), rounds(loaders)
    assert sorted(flat(first)) == sorted(flat(second)) == list(range(12))
    assert first != second


@pytest.mark.torch_private
@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", ["map", "stream"])
def test_a_stateful_loader_stays_one_and_resumes(kind: str, workers: int) -> None:
    from torchdata.stateful_dataloader import StatefulDataLoader

    def make(rank: int) -> Any:
        data: Any = {"dataset": Stream(23)} if kind == "stream" else {"dataset": Numbers(23), "shuffle": True}
        loader = StatefulDataLoader(**data, batch_size=2, num_workers=workers)
        return prepare_loader(loader, plan=Plan(seed=1), rank=rank, world_size=2)

    for rank in range(2):
        loader, fresh = make(rank), make(rank)
        iterator = iter(loader)
        for _ in range(3):
            next(iterator)
        fresh.load_state_dict(loader.state_dict())
        assert isinstance(loader, StatefulDataLoader)
        assert "stateful" in loader.state_dict()
        assert lists(fresh) == [batch.tolist() for batch in iterator]
        assert lists(fresh) == lists(loader)


@pytest.mark.parametrize("kind", ["shuffled", "stream"])
def test_skip_first_batches_skips_and_counts_epochs_with_the_loader(kind: str) -> None:
    (loader,), (other,) = all_ranks(maker(kind, 20, 3), 1), all_ranks(maker(kind, 20, 3), 1)
    whole, following = lists(other), lists(other)
    skipping = skip_first_batches(loader, 4)
    assert lists(skipping) == whole[4:]
    assert (skipping.end_of_loader, loader.end_of_loader, loader.epoch) == (True, True, 1)
    assert lists(loader) == following


def test_skip_first_batches_takes_a_plain_loader_too() -> None:
    dataset = Numbers(10)
    skipping = skip_first_batches(DataLoader(dataset, 3), 2)
    assert len(skipping) == 2
    assert (lists(skipping), lists(skipping)) == ([[6, 7, 8], [9]],) * 2
    assert dataset.read == 8


# --- an ordinary loader


def test_it_stays_the_user_s_class_with_what_it_had() -> None:
    class Doubling(DataLoader[Any]):
        def __init__(self, data: Dataset[Any], factor: int) -> None:
            super().__init__(data, batch_size=2)
            self.factor = factor

        def __iter__(self) -> Any:
            return (batch * self.factor for batch in super().__iter__())

    mine = Doubling(Numbers(5), 2)
    loader = prepare_loader(mine, plan=Plan(), rank=1, world_size=2)
    assert isinstance(loader, Doubling)
    assert (loader.factor, loader.batch_size, lists(loader)) == (2, 2, [[4, 6], [2, 4]])
    assert lists(mine) == [[0, 2], [4, 6], [8]]


def test_preparing_twice_is_harmless() -> None:
    loader = prepare_loader(maker("shuffled", 5, 2)(), plan=Plan())
    assert prepare_loader(loader, plan=Plan(), rank=0, world_size=2) is loader


def test_it_can_be_pickled() -> None:
    (loader,) = all_ranks(maker("shuffled", 10, 2), 1)
    assert lists(pickle.loads(pickle.dumps(loader))) == lists(loader)


def test_batches_stay_where_they_are_on_the_cpu() -> None:
    batch = torch.ones(2)
    loader: DataLoader[Any] = DataLoader([batch], batch_size=None, collate_fn=lambda item: item)
    assert next(iter(prepare_loader(loader, plan=Plan()))) is batch


def test_batches_go_to_the_device_as_a_whole() -> None:
    class Own:
        device = "cpu"

        def to(self, device: torch.device) -> Own:
            moved = Own()
            moved.device = str(device)
            return moved

    for batch in ({"a": [torch.ones(2)]}, Own()):
        loader: DataLoader[Any] = DataLoader([batch], batch_size=None, collate_fn=lambda item: item)
        (found,) = prepare_loader(loader, plan=Plan(), device="meta")
        moved = found if isinstance(found, Own) else found["a"][0]
        assert str(moved.device) == "meta"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("workers", [0, 2])
def test_batches_come_to_the_gpu_whole(workers: int) -> None:
    data = torch.randn(64, 1 << 14)
    loader = prepare_loader(DataLoader(data, 4, num_workers=workers), plan=Plan(), device="cuda")
    found = [(batch * 2).cpu() / 2 for batch in loader if batch.is_cuda]
    assert torch.equal(torch.cat(found), data)


def test_the_state_knows_the_loader_of_the_innermost_loop() -> None:
    outer, inner = (prepare_loader(maker("sequential", 4, 2)(), plan=Plan()) for _ in range(2))
    for _ in outer:
        assert state.current().loader is outer
        for _ in inner:
            assert state.current().loader is inner
            break
        assert (state.current().loader, inner.iterating) == (outer, False)
    assert state.current().loader is None


def test_even_batches_can_be_changed_between_epochs() -> None:
    loaders = all_ranks(maker("sequential", 5, 2), 2)
    loaders[1].even_batches = False
    assert (len(loaders[0]), len(loaders[1]), lists(loaders[1])) == (2, 1, [[2, 3]])


@dataclass
class Record:
    tensor: Any
    name: str = "name"


def test_tensors_in_any_structure_are_found_and_its_types_stay() -> None:
    one = torch.ones(1)
    value = [
        (one, "text"),
        Pair(one, None),
        OrderedDict(a=one),
        defaultdict(list, b=one),
        UserDict({"c": {"d": one}}),
        Record(one),
    ]
    found = map_tensors(lambda tensor: 7, value)
    assert [type(item) for item in found] == [type(item) for item in value]
    assert found == [(7, "text"), (7, None), {"a": 7}, {"b": 7}, UserDict({"c": {"d": 7}}), Record(7)]
    assert value[2] == {"a": one}


# --- slow data


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def watched(loading: float, computing: float, batches: int = 60) -> list[tuple[float, float]]:
    clock = Clock()
    watch = LoadingWatch(clock)
    found = []
    for _ in range(batches):
        watch.ask()
        clock.now += loading
        found.append(watch.arrived())
        clock.now += computing
    return [times for times in found if times is not None]


def test_waiting_for_more_than_a_quarter_of_the_time_is_said_once() -> None:
    (times,) = watched(loading=0.03, computing=0.06)
    assert times == pytest.approx((0.03, 0.09))


@pytest.mark.parametrize(("loading", "computing"), [(0.03, 0.12), (0.001, 0.0)])
def test_waiting_that_is_a_small_part_or_short_is_not_said(loading: float, computing: float) -> None:
    assert watched(loading, computing) == []


def test_the_start_of_workers_is_no_waiting_for_data() -> None:
    assert watched(loading=1.0, computing=0.0, batches=21) == []


def test_the_warning_names_the_share_and_what_to_change() -> None:
    class Slow(Numbers):
        def __getitem__(self, index: int) -> int:
            time.sleep(0.006)
            return index

    with pytest.warns(
        UserWarning, match=r"took \d+% of the last 20 steps .* give the DataLoader num_workers=2 or more"
    ):
        lists(prepare_loader(DataLoader(Slow(24)), plan=Plan()))


# --- bad input


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: prepare_loader([1, 2], plan=Plan()), "takes a torch.utils.data.DataLoader, not list: put the data"),
        (lambda: prepare_loader(DataLoader([1]), plan=Plan(), rank=0), "give both, as in rank=0, world_size=2"),
        (lambda: prepare_loader(DataLoader([1]), plan=Plan(), rank=2, world_size=2), "rank=2 with world_size=2"),
        (
            lambda: prepare_loader(DataLoader([1]), plan=Plan(dispatch=True), rank=0, world_size=2),
            "leave out rank=, sharded=True and DistributedSampler, or plan dispatch=False",
        ),
        (
            lambda: prepare_loader(
                DataLoader([1], sampler=DistributedSampler([1], num_replicas=3, rank=1)), rank=1, world_size=2
            ),
            "made for rank 1 of 3, and this is rank 1 of 2: leave it out",
        ),
        (lambda: prepare_loader(DataLoader([1]), plan=Plan()).load_state_dict({"epoch": 1}), "it lacks batches, gen"),
        (lambda: skip_first_batches(DataLoader([1]), -1), "num_batches=-1 is negative"),
        (lambda: skip_first_batches(DataLoader(Stream(3)), 1), "type loader = nbdist.prepare(loader) first"),
    ],
)
def test_bad_input_is_one_clear_error(call: Callable[[], Any], text: str) -> None:
    with pytest.raises(UsageError) as caught:
        call()
    assert text in str(caught.value)


def test_a_loader_without_a_length_says_so() -> None:
    with pytest.raises(TypeError, match="its data has none"):
        len(prepare_loader(DataLoader(Stream(3)), plan=Plan()))
