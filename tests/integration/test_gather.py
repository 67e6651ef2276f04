"""Values of all ranks: what is gathered, reduced and broadcast, and ranks that call differently."""

from __future__ import annotations

import pytest

from testbed.kernel import Kernel
from tests.support.cells import TRAINING, on_ranks, refused, value


@pytest.fixture(autouse=True)
def _names(ranks: Kernel) -> None:
    on_ranks(ranks, TRAINING)


def test_gather_joins_tensors_of_any_type_in_the_order_of_ranks(ranks: Kernel) -> None:
    code = """
told = []
for kind in (torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.bool, torch.complex64):
    joined = nbdist.gather(torch.full((2, 1), rank, dtype=kind))
    told.append(joined.flatten().to(torch.complex64).real.tolist() == [0, 0, 1, 1])
across = nbdist.gather(torch.arange(4).view(2, 2).t() + rank)
all(told), nbdist.gather(torch.tensor(rank)).tolist(), across[:, 0].tolist()"""
    assert value(ranks, code) == "(True, [0, 1], [0, 1, 1, 2])"


def test_gather_keeps_the_structure(ranks: Kernel) -> None:
    code = """
import collections
Pair = collections.namedtuple("Pair", "a b")
result = nbdist.gather({"x": [torch.tensor([rank])], "y": Pair(torch.tensor(rank), (torch.ones(0, 3),))})
type(result["y"]).__name__, result["x"][0].tolist(), result["y"].a.tolist(), tuple(result["y"].b[0].shape)"""
    assert value(ranks, code) == "('Pair', [0, 1], [0, 1], (0, 3))"


@pytest.mark.parametrize(
    "call",
    [
        "gather(loss)",
        "gather({'loss': loss})",
        "gather_for_metrics(loss)",
        "reduce(loss, 'mean')",
        "broadcast(loss)",
        "check_trigger()",
    ],
)
def test_a_number_of_each_rank_costs_one_collective(ranks: Kernel, call: str) -> None:
    code = f"""
gloo = dist.group.WORLD._get_backend(torch.device("cpu"))
loss = torch.tensor(0.5 + rank)
before = gloo._get_sequence_number_for_group()
nbdist.{call}
gloo._get_sequence_number_for_group() - before"""
    assert value(ranks, code) == "1"


def test_numbers_of_any_type_come_as_they_are(ranks: Kernel) -> None:
    """Those of 32 bits travel with the comparison of the calls, the others after it."""
    code = """
special = [1.5 + rank, -0.0, float("inf"), -float("inf"), 65504.0]
kinds = [torch.float32, torch.float16, torch.bfloat16, torch.float64]
samples = [torch.tensor(number, dtype=kind) for number in special for kind in kinds]
whole = [torch.int64, torch.int32, torch.int16, torch.int8]
samples += [torch.tensor(number - rank, dtype=kind) for number in (-1, 127) for kind in whole]
samples += [torch.tensor(rank, dtype=torch.uint8), torch.tensor(rank == 0), torch.tensor(1j + rank)]
wrong = []
for sample in samples:
    for shaped in (sample, sample[None], sample[None, None], sample.expand(2)[:1]):
        dist.all_gather_object(parts := [None, None], shaped)
        together, first = nbdist.gather(shaped), nbdist.broadcast(shaped.clone())
        expected = torch.stack(parts) if sample is shaped else torch.cat(parts)
        same = torch.equal(together, expected) and together.dtype == sample.dtype and together.shape == expected.shape
        if not same or not torch.equal(first, parts[0]) or first.shape != shaped.shape:
            wrong.append(shaped)
wrong"""
    assert value(ranks, code) == "[]"


def test_sums_of_numbers_have_the_type_and_shape_that_other_sums_have(ranks: Kernel) -> None:
    code = """
told = []
for kind in (torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.int32, torch.uint8, torch.bool):
    for reduction in ("sum", "mean"):
        small = nbdist.reduce(torch.tensor([rank], dtype=kind), reduction, scale=3.0)
        large = nbdist.reduce(torch.tensor([rank] * 3, dtype=kind), reduction, scale=3.0)
        told.append(torch.equal(small, large[:1]) and small.dtype == large.dtype)
set(told), nbdist.reduce(torch.tensor(1.0 + rank, requires_grad=True))"""
    assert value(ranks, code) == "({True}, tensor(3.))"


def test_a_number_that_is_elsewhere_on_one_rank_is_told_on_all(ranks: Kernel) -> None:
    """Where it can be read at once it travels with the comparison: who has it on a device expects another exchange."""
    code = "nbdist.gather(torch.tensor(1.0, device='cpu' if rank == 0 else 'meta'))"
    assert "rank 0 with it: [] torch.float32 on the CPU; rank 1 with it: [] torch.float32" in refused(ranks, code)


@pytest.mark.parametrize("function", ["gather", "reduce", "broadcast"])
def test_shapes_that_differ_are_told_on_all_ranks(ranks: Kernel, function: str) -> None:
    text = refused(ranks, f"nbdist.{function}([torch.ones(2 + rank, 3)])")
    assert f"ranks called {function} with different tensors: rank 0 with [0]: [2, 3] torch.float32; rank 1" in text


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (
            "broadcast(torch.ones(1), rank)",
            "broadcast with different arguments: rank 0 with from_process=0; rank 1 with from_process=1",
        ),
        (
            "reduce(torch.ones(1), ['sum', 'mean'][rank])",
            "reduce with different arguments: rank 0 with reduction='sum', scale=1.0",
        ),
        ("reduce(torch.ones(1), ['sum', 'max'][rank])", 'is unknown: allowed values: "mean", "sum" and "none"'),
        (
            "broadcast_object_list([0] * (1 + rank))",
            "rank 0 with 1 objects, from_process=0; rank 1 with 2 objects",
        ),
    ],
)
def test_other_arguments_on_a_rank_are_told_on_all(ranks: Kernel, call: str, told: str) -> None:
    assert told in refused(ranks, f"nbdist.{call}")


@pytest.mark.parametrize(
    ("call", "name"), [("gather(torch.ones(1))", "gather"), ("gather_object([1])", "gather_object")]
)
def test_ranks_that_call_different_functions_are_told_so(ranks: Kernel, call: str, name: str) -> None:
    text = refused(ranks, f"nbdist.prepare(Net(), plan=Plan()) if rank == 0 else nbdist.{call}")
    assert f"rank 0 called prepare, rank 1 {name}: call the same function on all ranks" in text


def test_an_exchange_of_the_users_own_is_not_taken_for_an_answer(own_ranks: Kernel) -> None:
    """Its bytes would be read as a length of petabytes."""
    code = "import nbdist, torch\nresult = [None, None]"
    own_ranks.ok(f"%%distributed\n{code}")
    cell = "if rank == 0: nbdist.gather(torch.ones(1))\nelse: torch.distributed.all_gather_object(result, 'mine')"
    outcome = own_ranks.fails(f"%%distributed\n{cell}", "RankError")
    assert "gather was called here while rank 1 is in a different collective" in outcome.traceback


def test_what_is_no_tensor_on_one_rank_is_told_on_all(ranks: Kernel) -> None:
    text = refused(ranks, "nbdist.gather({'a': torch.ones(1) if rank == 0 else 'one'})")
    assert "rank 1: gather takes tensors, or lists, tuples and dicts of them, and ['a'] is of type str" in text


def test_objects_of_all_ranks_are_joined(ranks: Kernel) -> None:
    assert value(ranks, "nbdist.gather_object([f'rank {rank}'] * (1 + rank))") == "['rank 0', 'rank 1', 'rank 1']"
    assert "gather_object takes a list, not int" in refused(ranks, "nbdist.gather_object(3 if rank else [3])")


@pytest.mark.parametrize("even", [True, False], ids=["even", "uneven"])
def test_metrics_count_no_sample_twice(ranks: Kernel, even: bool) -> None:
    code = f"""
loader = nbdist.prepare(DataLoader(torch.arange(11), 2), plan=Plan(even_batches={even}))
seen, objects = [], []
for part in loader:
    seen += nbdist.gather_for_metrics({{"sample": part}})["sample"].tolist()
    objects += nbdist.gather_for_metrics([f"{{number}}" for number in part.tolist()])
seen == list(range(11)), objects == [str(number) for number in range(11)]"""
    assert value(ranks, code) == "(True, True)"


def test_metrics_of_ranks_with_different_numbers_of_batches_are_refused_on_all(ranks: Kernel) -> None:
    code = """
for part in nbdist.prepare(DataLoader(torch.arange(6), 2), plan=Plan(even_batches=False)):
    nbdist.gather_for_metrics(part)"""
    text = refused(ranks, code)
    assert "different numbers of batches left: rank 0 with some; rank 1 with none. Plan even_batches=True" in text


def test_metrics_of_ranks_that_train_alone_are_all_kept(ranks: Kernel) -> None:
    code = """
loader = nbdist.prepare(DataLoader(torch.arange(3), 2), plan=Plan(strategy="none"))
[nbdist.gather_for_metrics(part).tolist() for part in loader]"""
    assert value(ranks, code) == "[[0, 1, 0, 1], [2, 2]]"


def test_tensors_are_padded_to_the_longest(ranks: Kernel) -> None:
    code = """
mine = torch.full((1 + rank, 2), float(rank))
behind = nbdist.pad_across_processes(mine, pad_index=-1)
in_front = nbdist.pad_across_processes([mine.t()], dim=1, pad_first=True)[0]
number = nbdist.pad_across_processes(torch.tensor(rank)).item()
nbdist.gather(behind)[:, 0].tolist(), nbdist.gather(in_front)[:, 0].tolist(), number == rank"""
    assert value(ranks, code) == "([0.0, -1.0, 1.0, 1.0], [0.0, 0.0, 1.0, 1.0], True)"


def test_reduce_and_broadcast(ranks: Kernel) -> None:
    code = """
mine = torch.tensor([float(rank)])
told = nbdist.reduce(mine, scale=2.0).item(), nbdist.reduce({"a": mine}, "mean")["a"].item(), mine.item() == rank
flags = nbdist.reduce(torch.tensor([rank == 1, True])).tolist(), nbdist.reduce(torch.tensor([rank]), "mean").item()
nbdist.broadcast(mine, from_process=1)
told, flags, mine.item(), nbdist.broadcast_object_list([rank, "a"], from_process=1)"""
    assert value(ranks, code) == "((2.0, 0.5, True), ([1, 2], 0.5), 1.0, [1, 'a'])"
    assert "is unknown: allowed values" in refused(ranks, "nbdist.reduce(torch.ones(1), 'max')")
    assert "from_process=2 is not a rank: there are ranks 0-1" in refused(ranks, "nbdist.broadcast(torch.ones(1), 2)")
