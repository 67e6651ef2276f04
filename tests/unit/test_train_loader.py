"""A prepared loader as an object: it goes on in the middle, is an ordinary DataLoader, and tells when data is slow."""

from __future__ import annotations

import pickle
import time
from collections import OrderedDict, UserDict, defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as some
from torch.nn.utils.rnn import pack_sequence
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

from nbdist.errors import UsageError
from nbdist.plan import Plan
from nbdist.train import state
from nbdist.train.collective.nested import map_tensors, rebuilt, tensors_in
from nbdist.train.data.feed import DeviceFeed, LoadingWatch
from nbdist.train.data.loaders import prepare_loader, skip_first_batches
from tests.support.train_data import Numbers, Pair, PlacedStream, Stream, all_ranks, flat, lists, maker, real, rounds

# Loops that do nothing with their data do wait for it.
pytestmark = [pytest.mark.filterwarnings("ignore:waiting for data"), pytest.mark.usefixtures("fresh_state")]

batch_sizes = some.integers(1, 6)
world_sizes = some.integers(1, 5)
kinds = some.sampled_from(["sequential", "shuffled", "sampler", "stream", "sized stream"])


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


def test_a_resume_with_half_the_ranks_and_twice_the_batch_goes_on_at_the_same_sample() -> None:
    loaders = all_ranks(maker("shuffled", 40, 2), 4)
    iterators = [iter(loader) for loader in loaders]
    seen = [next(iterator).tolist() for _ in range(2) for iterator in iterators]
    others = all_ranks(maker("shuffled", 40, 4), 2)
    for other in others:
        other.load_state_dict(loaders[0].state_dict())
    assert sorted(flat(seen) + flat(rounds(others))) == list(range(40))


def test_where_no_batch_of_another_size_begins_nothing_is_left_out() -> None:
    (loader,), (other,) = all_ranks(maker("sequential", 20, 4), 1), all_ranks(maker("sequential", 20, 3), 1)
    next(iter(loader))
    other.load_state_dict(loader.state_dict())
    assert flat(lists(other)) == list(range(3, 20))


def test_the_order_that_an_epoch_began_with_is_kept_whatever_seed_the_plan_has_now() -> None:
    (loader,) = all_ranks(maker("shuffled", 20, 4), 1, Plan(seed=1))
    (other,) = all_ranks(maker("shuffled", 20, 4), 1, Plan(seed=2))
    iterator = iter(loader)
    next(iterator)
    other.load_state_dict(loader.state_dict())
    assert lists(other) == [batch.tolist() for batch in iterator]


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


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
@pytest.mark.parametrize("workers", [0, 1])
def test_the_state_of_a_stream_is_that_of_the_batch_given_out_although_the_next_is_read(workers: int) -> None:
    from torchdata.stateful_dataloader import StatefulDataLoader

    def make() -> Any:
        loader = StatefulDataLoader(PlacedStream(10), 2, num_workers=workers)
        return prepare_loader(loader, plan=Plan(seed=1), sharded=True)

    loader, fresh = make(), make()
    iterator = iter(loader)
    next(iterator)
    fresh.load_state_dict(loader.state_dict())
    assert lists(fresh) == [[2, 3], [4, 5], [6, 7], [8, 9]]


@pytest.mark.parametrize("kind", ["shuffled", "stream"])
def test_skip_first_batches_skips_and_counts_epochs_with_the_loader(kind: str) -> None:
    (loader,), (other,) = all_ranks(maker(kind, 20, 3), 1), all_ranks(maker(kind, 20, 3), 1)
    whole, following = lists(other), lists(other)
    skipping: Any = skip_first_batches(loader, 4)
    assert lists(skipping) == whole[4:]
    assert kind == "stream" or len(skipping) == len(whole) - 4
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
    data: Any = [batch]
    loader: DataLoader[Any] = DataLoader(data, batch_size=None, collate_fn=lambda item: item)
    assert next(iter(prepare_loader(loader, plan=Plan()))) is batch


def test_batches_go_to_the_device_as_a_whole() -> None:
    class Own:
        device = "cpu"

        def to(self, device: torch.device) -> Own:
            moved = Own()
            moved.device = str(device)
            return moved

    packed = pack_sequence([torch.ones(3), torch.ones(2)])
    batch = {"tensors": [torch.ones(2)], "own": (Own(), packed), "text": "to"}
    data: Any = [batch]
    loader: DataLoader[Any] = DataLoader(data, batch_size=None, collate_fn=lambda item: item)
    (found,) = prepare_loader(loader, plan=Plan(), device="meta")
    own, sequence = found["own"]
    assert {str(one.device) for one in (found["tensors"][0], own, sequence.data)} == {"meta"}
    assert sequence.batch_sizes.tolist() == [2, 2, 1]  # which belong on the CPU


def test_all_epochs_copy_on_one_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """The allocator keeps the memory of each stream apart, so a stream for each epoch would hold an epoch's batches."""
    made: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "Stream", made.append)
    device = torch.device("cuda", 77)
    for _ in range(3):
        DeviceFeed(device)
    assert made == [device]


@pytest.mark.gpu
@pytest.mark.parametrize("workers", [0, 2])
def test_batches_come_to_the_gpu_whole(workers: int) -> None:
    data: Any = torch.randn(64, 1 << 14)
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


def test_a_loop_that_is_closed_late_does_not_end_the_next_one() -> None:
    """As when a traceback holds it, or the garbage collector comes late."""
    loader = prepare_loader(maker("sequential", 8, 2)(), plan=Plan())
    for again in (loader, skip_first_batches(loader, 1)):
        left: Any = iter(loader)
        iterator: Any = iter(again)
        next(left), next(iterator)
        left.close()
        assert (state.current().loader is again, loader.iterating) == (True, True)
        iterator.close()
        assert (state.current().loader, loader.iterating) == (None, False)


def test_even_batches_can_be_changed_between_epochs() -> None:
    loaders = all_ranks(maker("sequential", 5, 2), 2)
    loaders[1].even_batches = False
    assert (len(loaders[0]), len(loaders[1]), lists(loaders[1])) == (2, 1, [[2, 3]])


@dataclass
class Record:
    tensor: Any
    name: str = "name"


def test_tensors_are_put_back_into_mappings_that_take_more_than_their_items() -> None:
    value: defaultdict[str, Any] = defaultdict(list, {"logits": torch.zeros(2)})
    found = rebuilt(value, iter([tensor + 1 for _, tensor in tensors_in(value, "gather")]))
    assert type(found) is defaultdict and found["logits"].tolist() == [1, 1] and found["more"] == []


def test_tensors_in_any_structure_are_found_and_its_types_stay() -> None:
    one = torch.ones(1)
    value = [
        (one, "text"),
        Pair(one, None),
        OrderedDict(a=one),
        defaultdict(torch.Tensor, b=one),
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

ONE: Any = [1]


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (
            lambda: prepare_loader(cast(Any, [1, 2]), plan=Plan()),
            "takes a torch.utils.data.DataLoader, not list: put the data",
        ),
        (lambda: prepare_loader(DataLoader(ONE), plan=Plan(), rank=0), "give both, for example rank=0, world_size=2"),
        (lambda: prepare_loader(DataLoader(ONE), plan=Plan(), rank=2, world_size=2), "rank=2 with world_size=2"),
        (
            lambda: prepare_loader(DataLoader(ONE), plan=Plan(dispatch=True), rank=0, world_size=2),
            "leave out rank=, sharded=True and DistributedSampler, or plan dispatch=False",
        ),
        (
            lambda: prepare_loader(
                DataLoader(ONE, sampler=DistributedSampler(ONE, num_replicas=3, rank=1)), rank=1, world_size=2
            ),
            "made for rank 1 of 3, and this is rank 1 of 2: leave it out",
        ),
        (lambda: prepare_loader(DataLoader(ONE), plan=Plan()).load_state_dict({"epoch": 1}), "it lacks batches, gen"),
        (lambda: skip_first_batches(DataLoader(ONE), -1), "num_batches=-1 is negative"),
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
