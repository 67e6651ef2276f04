"""Loaders on real ranks: they agree on the order, rank 0 reads for all, and what is wrong is one error on all."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from testbed.kernel import Kernel
from tests.support.cells import on_ranks, usage_error

SETUP = """
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler
import nbdist
from nbdist.plan import Plan
from nbdist.train import state
from nbdist.train.data.loaders import prepare_loader, skip_first_batches
from tests.support.train_data import *

def prepared(dataset, batch_size=2, plan=Plan(), **settings):
    return prepare_loader(DataLoader(dataset, batch_size, **settings), plan=plan, device="cpu")

def together(value):
    "What the ranks have, in their order."
    values = [None] * world_size
    dist.all_gather_object(values, value)
    return values

def steps(loader):
    batches = together(lists(loader))
    return [[rank[step] for rank in batches if step < len(rank)] for step in range(max(map(len, batches)))]

torch.manual_seed(rank)
state.begin(Plan())
"""


@pytest.fixture
def loading(ranks: Kernel) -> Iterator[Kernel]:
    """Two ranks that were seeded each in its own way, with what loaders are made from."""
    on_ranks(ranks, SETUP)
    yield ranks


# --- one order


@pytest.mark.parametrize("order", ["shuffle=True", "sampler=AnySampler(21)"])
def test_ranks_that_were_seeded_differently_shuffle_alike_and_anew_in_each_epoch(loading: Kernel, order: str) -> None:
    on_ranks(loading, f"loader = prepared(Numbers(21), {order})\nfirst, second = steps(loader), steps(loader)")
    assert on_ranks(loading, "sorted(real(first, loader.remainder)) == list(range(21))") == ["[0-1] True"]
    assert on_ranks(loading, "sorted(real(second, loader.remainder)) == list(range(21))") == ["[0-1] True"]
    assert on_ranks(loading, "first != second, [len(step) for step in first]") == ["[0-1] (True, [2, 2, 2, 2, 2, 2])"]


def test_the_plan_s_seed_gives_the_same_order_in_each_run(loading: Kernel) -> None:
    code = "orders = [steps(prepared(Numbers(9), shuffle=True, plan=Plan(seed=3))) for _ in range(2)]\n"
    assert on_ranks(loading, code + "orders[0] == orders[1]") == ["[0-1] True"]


def test_generators_of_users_that_differ_become_as_on_rank_0(loading: Kernel) -> None:
    on_ranks(loading, "generator = torch.Generator().manual_seed(rank)")
    on_ranks(loading, "loader = prepared(Numbers(21), shuffle=True, generator=generator)\nfound = steps(loader)")
    assert on_ranks(loading, "sorted(real(found, loader.remainder)) == list(range(21))") == ["[0-1] True"]


@pytest.mark.torch_private
@pytest.mark.parametrize("workers", [0, 2])
def test_a_stream_that_shuffles_with_the_global_generators_is_read_alike(loading: Kernel, workers: int) -> None:
    on_ranks(loading, f"loader = prepared(ShuffledStream(19), num_workers={workers})\nfound = steps(loader)")
    assert on_ranks(loading, "sorted(real(found, loader.remainder)) == list(range(19))") == ["[0-1] True"]


def test_a_distributed_sampler_is_left_alone(loading: Kernel) -> None:
    on_ranks(
        loading, "sampler = DistributedSampler(Numbers(8), seed=1)\nloader = prepared(Numbers(8), sampler=sampler)"
    )
    assert on_ranks(loading, "[flat(lists(loader)) == (sampler.set_epoch(e), list(sampler))[1] for e in range(2)]") == [
        "[0-1] [True, True]"
    ]


def test_ranks_that_were_interrupted_at_different_epochs_come_together(loading: Kernel) -> None:
    on_ranks(loading, "loader = prepared(Numbers(8), shuffle=True)\nloader._progress.epoch = rank")
    assert on_ranks(loading, "sorted(flat(steps(loader))), loader.epoch") == ["[0-1] ([0, 1, 2, 3, 4, 5, 6, 7], 2)"]


def test_the_fill_of_the_last_batches_is_not_gathered_for_metrics(loading: Kernel) -> None:
    on_ranks(loading, "loader = nbdist.prepare(DataLoader(Numbers(11), 2), plan=Plan())")
    on_ranks(loading, "found = [nbdist.gather_for_metrics(batch).tolist() for batch in loader]")
    assert on_ranks(loading, "flat(found) == list(range(11))") == ["[0-1] True"]


# --- going on


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("seed", [None, 4])
def test_a_resume_in_the_middle_has_the_same_order_bit_for_bit(loading: Kernel, workers: int, seed: int | None) -> None:
    make = f"prepared(Numbers(21), shuffle=True, num_workers={workers}, plan=Plan(seed={seed}))"
    on_ranks(loading, f"loader = {make}\nsteps(loader)\nit = iter(loader)\nnext(it), next(it)")
    on_ranks(loading, "kept = loader.state_dict()\nrest, following = lists(it), lists(loader)")
    on_ranks(loading, f"torch.manual_seed(99 + rank)\nfresh = {make}\nfresh.load_state_dict(kept)")
    assert on_ranks(loading, "len(rest), lists(fresh) == rest, lists(fresh) == following") == ["[0-1] (4, True, True)"]


def test_ranks_that_resume_at_different_places_are_told(loading: Kernel) -> None:
    on_ranks(loading, "loader = prepared(Numbers(20))\nkept = loader.state_dict()")
    text = usage_error(loading, "loader.load_state_dict({**kept, 'batches': 2 + rank})\nlists(loader)")
    assert "batch 2 of epoch 0 on rank 0, batch 3 of epoch 0 on rank 1. Load the same checkpoint" in text


# --- rank 0 reads


NESTED = """
def collate(numbers):
    one = torch.tensor(numbers)
    return {"pair": Pair(one, [one.to(torch.bfloat16), str(numbers)]), "flag": one > 3, "none": torch.empty(0)}
"""


def test_dispatch_hands_out_what_rank_0_reads(loading: Kernel) -> None:
    on_ranks(loading, NESTED + "data = Numbers(11)\nplan = Plan(dispatch=True)")
    on_ranks(loading, "loader = prepared(data, collate_fn=collate, plan=plan)\nbatches = list(loader)")
    assert on_ranks(loading, "[b['pair'].left.tolist() for b in batches]") == [
        "[0] [[0, 1], [4, 5], [8, 9]]\n[1] [[2, 3], [6, 7], [10, 0]]"
    ]
    on_ranks(loading, "batch = batches[1]\npair = batch['pair']")
    assert on_ranks(loading, "type(pair).__name__, pair.right, batch['flag'].tolist(), len(batch['none'])") == [
        "[0] ('Pair', [tensor([4., 5.], dtype=torch.bfloat16), '[4, 5]'], [True, True], 0)\n"
        "[1] ('Pair', [tensor([6., 7.], dtype=torch.bfloat16), '[6, 7]'], [True, True], 0)"
    ]
    assert on_ranks(loading, "data.read, len(loader), loader.remainder, loader.batches_left") == [
        "[0] (12, 3, 3, 0)\n[1] (0, 3, 3, 0)"
    ]


@pytest.mark.parametrize("even", [True, False])
@pytest.mark.parametrize("size", [0, 1, 6, 8])
@pytest.mark.parametrize("data", ["Numbers", "Stream"])
def test_dispatch_gives_every_sample_once(loading: Kernel, data: str, size: int, even: bool) -> None:
    code = f"loader = prepared({data}({size}), plan=Plan(dispatch=True, even_batches={even}))\nfound = steps(loader)"
    on_ranks(loading, code)
    assert on_ranks(loading, f"real(found, loader.remainder or 0) == list(range({size}))") == ["[0-1] True"]
    if even:
        assert on_ranks(loading, "all(len(batch) == 2 for step in found for batch in step)") == ["[0-1] True"]


def test_dispatch_needs_the_data_on_rank_0_only(loading: Kernel) -> None:
    on_ranks(loading, "loader = prepared(Numbers(9 if rank == 0 else 1), shuffle=True, plan=Plan(dispatch=True))")
    assert on_ranks(loading, "len(loader), sorted(real(steps(loader), loader.remainder)), len(loader)") == [
        "[0-1] (3, [0, 1, 2, 3, 4, 5, 6, 7, 8], 3)"
    ]


def test_dispatch_resumes_in_the_middle(loading: Kernel) -> None:
    on_ranks(loading, "make = lambda: prepared(Numbers(21), shuffle=True, num_workers=1, plan=Plan(dispatch=True))")
    on_ranks(
        loading, "loader = make()\nit = iter(loader)\nnext(it), next(it)\nkept, fresh = loader.state_dict(), make()"
    )
    on_ranks(loading, "rest, following = lists(it), lists(loader)\nfresh.load_state_dict(kept)")
    assert on_ranks(loading, "len(rest), lists(fresh) == rest, lists(fresh) == following") == ["[0-1] (4, True, True)"]


def test_an_error_in_rank_0_s_data_is_the_same_error_on_all_ranks(loading: Kernel) -> None:
    code = """
    class Broken(Numbers):
        def __getitem__(self, index):
            return index if index < 6 else 1 // 0
    loader = prepared(Broken(20), plan=Plan(dispatch=True))
    try:
        seen = lists(loader)
    except ZeroDivisionError as error:
        said = str(error)
    said
    """
    assert on_ranks(loading, code.replace("\n    ", "\n")) == ["[0-1] 'integer division or modulo by zero'"]
    assert on_ranks(loading, "sorted(flat(steps(prepared(Numbers(4), plan=Plan(dispatch=True)))))") == [
        "[0-1] [0, 1, 2, 3]"
    ]


@pytest.mark.parametrize(
    ("settings", "error", "text"),
    [
        ("collate_fn=lambda numbers: lambda: numbers", "UsageError", "can't be sent (Can't pickle"),
        (
            "num_workers=1, multiprocessing_context='spawn', collate_fn=lambda numbers: numbers",
            "PicklingError",
            "attribute lookup <lambda>",
        ),
    ],
)
def test_batches_that_cant_be_sent_and_workers_that_cant_start_are_one_error(
    loading: Kernel, settings: str, error: str, text: str
) -> None:
    on_ranks(loading, f"loader = prepared(Numbers(4), plan=Plan(dispatch=True), {settings})")
    on_ranks(loading, "try: lists(loader)\nexcept Exception as error: said = type(error).__name__, str(error)")
    assert on_ranks(loading, f"said[0], {text!r} in said[1] or said[1]") == [f"[0-1] ('{error}', True)"]


def test_dispatch_with_data_that_shares_itself_out_is_refused(loading: Kernel) -> None:
    code = "prepare_loader(DataLoader(Stream(3)), plan=Plan(dispatch=True), sharded=True)"
    assert "leave out rank=, sharded=True and DistributedSampler" in usage_error(loading, code)


# --- ranks that disagree


@pytest.mark.parametrize(
    ("code", "text"),
    [
        ("prepared(Numbers(8 + 4 * rank))", "4 on rank 0, 6 on rank 1. Give all ranks the same data"),
        (
            "prepare_loader(DataLoader(Numbers(8 - rank), batch_size=2))",
            "datasets of different lengths: 8 on rank 0, 7 on rank 1. Give all ranks the same data",
        ),
        ("prepared(Numbers(8) if rank else Stream(8))", "an unknown number of on rank 0, 4 on rank 1"),
        (
            "prepare_loader(DataLoader(Numbers(8 + rank)), sharded=True)",
            "8 on rank 0, 9 on rank 1. Make them equal, or plan even_batches=False and train inside join",
        ),
        (
            "prepared(Numbers(8), sampler=DistributedSampler(Numbers(8), num_replicas=2, rank=0))",
            "the loader's DistributedSampler is made for rank 0 of 2, and this is rank 1 of 2",
        ),
    ],
)
def test_loaders_that_differ_are_one_error_on_all_ranks(loading: Kernel, code: str, text: str) -> None:
    on_ranks(loading, f"loader = {code}\nsaid = None")
    on_ranks(loading, "try: lists(loader)\nexcept nbdist.UsageError as error: said = str(error)")
    assert on_ranks(loading, f"{text!r} in said or said") == ["[0-1] True"]


def test_data_of_each_rank_s_own_may_be_uneven_if_the_plan_says_so(loading: Kernel) -> None:
    on_ranks(
        loading, "loader = prepare_loader(DataLoader(Numbers(3 + rank)), plan=Plan(even_batches=False), sharded=True)"
    )
    assert on_ranks(loading, "len(lists(loader))") == ["[0] 3\n[1] 4"]
