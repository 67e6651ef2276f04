"""Models that a lost step has left half done train on as if it had not been, as the same objects."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from typing import cast

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

from nbdist.worker.recovery.reset_models import buckets_settled, living, reset_models
from testbed.kernel import Kernel
from tests.conftest import _shared as shared
from tests.stress.lost_steps import Scenarios
from tests.support.group_of_one import group_of_one

DDP_KINDS = [
    "DDP",
    "DDP gradient_as_bucket_view",
    "DDP static_graph",
    "DDP find_unused_parameters",
    "DDP hook",
    "DDP fp16",
]
FSDP_KINDS = ["FSDP2", "FSDP2 bf16"]

pytestmark = pytest.mark.torch_private


@pytest.fixture(scope="module")
def scenarios() -> Iterator[Scenarios]:
    program = Scenarios()
    shared.append(cast(Kernel, program))
    yield program
    shared.remove(cast(Kernel, program))
    program.close()


@pytest.fixture(autouse=True)
def no_models_of_other_tests() -> None:
    """Those that wait for the garbage collector would be found."""
    gc.collect()


@pytest.fixture
def group() -> Iterator[None]:
    """A process group of this process alone."""
    with group_of_one():
        yield


@pytest.mark.parametrize("model", [*DDP_KINDS, *FSDP_KINDS, "by hand"])
def test_steps_that_are_lost_in_the_backward_change_nothing(scenarios: Scenarios, model: str) -> None:
    found = scenarios.run(model, lost="all: late backward")
    assert (found["difference"], found["ranks agree"], found["notes"]) == (0.0, True, [])


@pytest.mark.parametrize("where", ["before", "forward", "early backward"])
@pytest.mark.parametrize("model", ["DDP", "FSDP2"])
def test_it_does_not_matter_where_a_step_is_lost(scenarios: Scenarios, model: str, where: str) -> None:
    found = scenarios.run(model, lost=f"all: {where}")
    assert (found["difference"], found["ranks agree"]) == (0.0, True)


@pytest.mark.parametrize("where", ["before", "late backward"])
@pytest.mark.parametrize("model", ["DDP", "DDP static_graph", "FSDP2"])
def test_the_very_first_step_may_be_lost(scenarios: Scenarios, model: str, where: str) -> None:
    found = scenarios.run(model, lost=f"first: {where}")
    assert (found["difference"], found["ranks agree"]) == (0.0, True)


def test_hybrid_shards_on_four_ranks_train_on(scenarios: Scenarios) -> None:
    found = scenarios.run("FSDP2 HSDP", lost="all: late backward", world=4)
    assert (found["difference"], found["ranks agree"], found["notes"]) == (0.0, True, [])


def test_settled_buckets_can_be_kept_so_that_four_ranks_sum_in_the_same_order(scenarios: Scenarios) -> None:
    found = scenarios.run("DDP static_graph", lost="last: late backward", world=4, buckets="kept")
    assert (found["settled"], found["difference"], found["ranks agree"]) == ([True], 0.0, True)


def test_without_a_reset_training_would_not_go_on(scenarios: Scenarios) -> None:
    with pytest.raises(AssertionError, match="rank"):
        scenarios.run("DDP", lost="all: late backward", buckets="")


def test_gradients_of_what_an_optimizer_trains_are_dropped() -> None:
    layer = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(layer.parameters(), 0.1)
    layer(torch.ones(1, 2)).sum().backward()
    assert reset_models().gradients
    assert layer.weight.grad is None
    assert not reset_models().gradients
    del optimizer


def test_a_scaler_may_unscale_again_after_half_a_step() -> None:
    layer, scaler = torch.nn.Linear(2, 2), torch.amp.GradScaler("cpu")
    optimizer = torch.optim.SGD(layer.parameters(), 0.1)
    scaler.scale(layer(torch.ones(1, 2)).sum()).backward()
    scaler.unscale_(optimizer)
    reset_models()
    scaler.scale(layer(torch.ones(1, 2)).sum()).backward()
    scaler.unscale_(optimizer)
    assert layer.bias.grad is not None and layer.bias.grad.tolist() == [1.0, 1.0]


def test_it_is_said_that_statistics_have_moved() -> None:
    norm = torch.nn.BatchNorm1d(2)
    assert reset_models().statistics_stay
    norm.eval()
    assert not reset_models().statistics_stay


@pytest.mark.usefixtures("group")
def test_a_model_that_cannot_be_reset_becomes_a_note_and_stops_no_other() -> None:
    broken = DistributedDataParallel(torch.nn.Linear(2, 2))
    sound = DistributedDataParallel(torch.nn.Linear(2, 2))
    broken.reducer = None  # type: ignore[assignment]
    report = reset_models()
    assert report.models == 1
    (note,) = report.notes
    assert note.startswith("DistributedDataParallel(Linear) can't continue") and note.endswith("build it again")
    sound(torch.ones(1, 2)).sum().backward()


def test_what_was_interrupted_while_it_was_made_is_passed_over() -> None:
    made = [kind.__new__(kind) for kind in (DistributedDataParallel, torch.optim.SGD, torch.nn.BatchNorm1d)]
    assert buckets_settled()
    assert (reset_models().models, reset_models().notes) == (0, [])
    del made


@pytest.mark.usefixtures("group")
def test_a_model_whose_group_was_destroyed_says_so() -> None:
    model = DistributedDataParallel(torch.nn.Linear(2, 2))
    dist.destroy_process_group()
    notes = reset_models().notes
    assert notes == [
        "DistributedDataParallel(Linear) can't continue after a lost step: its process group was destroyed; "
        "wrap the module again"
    ]
    del model


@pytest.mark.usefixtures("group")
def test_buckets_settle_when_they_are_laid_out_anew_and_stay_so_when_kept() -> None:
    model = DistributedDataParallel(torch.nn.Linear(2, 2))
    assert not buckets_settled()
    for _ in range(2):
        model(torch.ones(1, 2)).sum().backward()
    assert buckets_settled()
    reset_models(keep_buckets=True)
    assert buckets_settled()
    reset_models()
    assert not buckets_settled()


def test_fsdp1_gets_advice() -> None:
    model = FullyShardedDataParallel.__new__(FullyShardedDataParallel)
    (note,) = reset_models().notes
    assert "FSDP1" in note and "fully_shard" in note
    del model


def test_the_scan_runs_no_code_of_the_objects_it_meets() -> None:
    class Proxy:
        @property  # type: ignore[misc]
        def __class__(self) -> type:
            raise AssertionError("asked for its class")

    class Unhashable(type):
        __hash__ = None  # type: ignore[assignment]

    class Odd(metaclass=Unhashable):
        pass

    kept = [Proxy(), Odd()]
    layer = torch.nn.Linear(2, 2)
    assert any(found is layer for found in living(torch.nn.Module))
    del kept


def test_without_torch_there_is_nothing_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torch")
    assert reset_models().models == 0
