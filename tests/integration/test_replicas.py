"""Ranks that have come apart: `check` finds it, `sync` gives the state of one rank to all."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from testbed.kernel import Kernel
from tests.conftest import shared_kernel
from tests.support.cells import on_ranks, usage_error

DDP = """
import nbdist, torch
import torch.distributed as dist
torch.manual_seed(0)
net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.LayerNorm(8), torch.nn.Linear(8, 1))
model = torch.nn.parallel.DistributedDataParallel(net)
optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
def step(module=model):
    optimizer.zero_grad()
    module(torch.ones(2, 4) * (rank + 1)).sum().backward()
    optimizer.step(); scheduler.step()
step()
"""
FSDP = """
import nbdist, torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 4))
fully_shard(model, mesh=init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape):]))
optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
model(torch.ones(2, 4) * (rank + 1)).sum().backward()
optimizer.step()
"""


@pytest.fixture(scope="module")
def four_ranks() -> Iterator[Kernel]:
    """A kernel with four ranks, shared by the tests of the module."""
    with shared_kernel(4) as kernel:
        yield kernel


def test_equal_ranks_agree(ranks: Kernel) -> None:
    assert on_ranks(ranks, DDP + "nbdist.check(model)") == ["[0-1] ranks 0-1 agree: 6 parameters"]
    assert on_ranks(ranks, "nbdist.check(model, optimizer, scheduler).equal") == ["[0-1] True"]


def test_check_names_the_first_tensor_that_differs_and_the_rank(ranks: Kernel) -> None:
    on_ranks(ranks, DDP + "with torch.no_grad(): net[2].weight[0, 3] += rank")
    assert on_ranks(ranks, "nbdist.check(model)") == ["[0-1] module.2.weight differs: rank 1"]
    assert on_ranks(ranks, "nbdist.check(model).differing") == ["[0-1] {'module.2.weight': (1,)}"]


def test_nan_equals_nan(ranks: Kernel) -> None:
    assert on_ranks(ranks, DDP + "net[0].bias.data[0] = float('nan'); bool(nbdist.check(model))") == ["[0-1] True"]


def test_buffers_that_differ_between_steps_are_said_to_be_usual(ranks: Kernel) -> None:
    (text,) = on_ranks(ranks, DDP + "norm = torch.nn.BatchNorm1d(2); norm.running_mean += rank\nnbdist.check(norm)")
    assert text.startswith("[0-1] running_mean differs: rank 1 (buffers only: usual between steps")


def test_a_rank_that_is_a_step_behind_gets_everything(ranks: Kernel) -> None:
    on_ranks(ranks, DDP + "kept = id(net[0].weight), id(optimizer.state[net[0].weight]['exp_avg'])")
    on_ranks(ranks, "if rank == 0: step(net)")
    (text,) = on_ranks(ranks, "nbdist.sync(model, optimizer, scheduler)")
    assert re.search(r"^\[0-1\] rank 1 was behind: 6 parameters, \d+ values of state, step 1 → 2$", text)
    assert on_ranks(ranks, "nbdist.check(model, optimizer, scheduler).equal") == ["[0-1] True"]
    assert on_ranks(ranks, "scheduler.last_epoch, optimizer.param_groups[0]['lr']") == ["[0-1] (2, 0.0025)"]
    assert on_ranks(ranks, "kept[0] == id(net[0].weight)") == ["[0-1] True"]
    assert on_ranks(ranks, "step()\nnbdist.check(model, optimizer, scheduler).equal") == ["[0-1] True"]


def test_optimizer_tensors_are_written_in_place(ranks: Kernel) -> None:
    on_ranks(ranks, DDP + "moment = optimizer.state[net[0].weight]['exp_avg']; moment += rank")
    (text,) = on_ranks(ranks, "nbdist.sync(optimizer)")
    assert text == "[0-1] rank 1 was different: 1 value of state"
    assert on_ranks(ranks, "moment is optimizer.state[net[0].weight]['exp_avg']") == ["[0-1] True"]
    assert on_ranks(ranks, "nbdist.check(optimizer).equal") == ["[0-1] True"]


def test_the_rank_that_is_right_can_be_chosen(ranks: Kernel) -> None:
    on_ranks(ranks, DDP + "if rank == 1: step(net)")
    (text,) = on_ranks(ranks, "nbdist.sync(model, optimizer, src=1)")
    assert text == "[0-1] rank 0 was behind: 6 parameters, 19 values of state, step 1 → 2"


def test_an_optimizer_without_state_gets_it(ranks: Kernel) -> None:
    on_ranks(ranks, DDP + "optimizer = torch.optim.AdamW(model.parameters(), 1e-2)\nif rank == 0: step(net)")
    on_ranks(ranks, "nbdist.sync(model, optimizer)")
    assert on_ranks(ranks, "len(optimizer.state), nbdist.check(model, optimizer).equal") == ["[0-1] (6, True)"]


def test_a_scaler_that_differs_is_brought_together(ranks: Kernel) -> None:
    on_ranks(ranks, DDP + "scaler = torch.amp.GradScaler('cpu', init_scale=2.0 ** (rank + 4))")
    assert on_ranks(ranks, "nbdist.sync(scaler)") == ["[0-1] rank 1 was different: 1 value of state"]
    assert on_ranks(ranks, "scaler.state_dict()['scale']") == ["[0-1] 16.0"]


def test_plain_tensors_of_any_type_are_brought_together(ranks: Kernel) -> None:
    code = "tensors = [torch.full((3,), rank, dtype=t) for t in (torch.bool, torch.bfloat16, torch.complex64)]\n"
    on_ranks(ranks, "import nbdist, torch\n" + code + "tensors.append(torch.full((2, 3), float(rank)).t())")
    on_ranks(ranks, "nbdist.sync(tensors, src=1)")
    assert on_ranks(ranks, "nbdist.check(tensors)") == ["[0-1] ranks 0-1 agree: 4 parameters"]
    assert on_ranks(ranks, "[tensor.real.sum().item() for tensor in tensors]") == ["[0-1] [3, 3.0, 3.0, 6.0]"]


def test_ranks_that_agree_are_left_alone(ranks: Kernel) -> None:
    assert on_ranks(ranks, DDP + "nbdist.sync(model, optimizer)") == ["[0-1] ranks 0-1 agreed already"]


@pytest.mark.parametrize(
    ("call", "advice"),
    [
        ("nbdist.sync(model, src=7)", "src=7 is not one of ranks 0-1: pass src=0"),
        ("nbdist.sync(model, src=rank)", "rank 0 with src=0; rank 1 with src=1. Pass the same values on all ranks"),
        ("nbdist.sync()", "write nbdist.sync(model, optimizer)"),
        ("nbdist.check('model')", "check can't handle 'str' objects"),
        ("nbdist.check(*[model, optimizer][:rank + 1])", "ranks called check with different arguments"),
        ("nbdist.sync(torch.nn.Linear(3, rank + 1))", "weight is float32[1, 3] on rank 0, float32[2, 3] on rank 1"),
        ("nbdist.sync(model if rank else 3)", "rank 0: sync can't handle 'int' objects"),
    ],
)
def test_bad_input_is_one_error_on_all_ranks(ranks: Kernel, call: str, advice: str) -> None:
    on_ranks(ranks, "if 'model' not in globals():\n" + "".join(f"    {line}\n" for line in DDP.splitlines()))
    assert advice in usage_error(ranks, call)


def test_outside_of_a_distributed_cell_it_says_where_to_type_it(ranks: Kernel) -> None:
    outcome = ranks.fails("import nbdist\nnbdist.check([])", "UsageError")
    assert "put it into a %%distributed cell" in outcome.evalue


def test_shards_without_replicas_are_not_compared(ranks: Kernel) -> None:
    (text,) = on_ranks(ranks, "shape = (2,)" + FSDP + "nbdist.check(model)")
    assert text == "[0-1] 4 shards can't be compared: no two ranks hold the same"


def test_shards_of_different_steps_are_refused_with_what_can_be_done(ranks: Kernel) -> None:
    on_ranks(ranks, "shape = (2,)" + FSDP + "if rank == 1: optimizer.step()")
    text = usage_error(ranks, "nbdist.sync(model, optimizer)")
    assert "rank 0 has done 1 step, rank 1 has done 2 steps: load a checkpoint on all ranks" in text


def test_shards_are_taken_from_the_replica_of_the_source(four_ranks: Kernel) -> None:
    on_ranks(four_ranks, "shape = (2, 2)" + FSDP + "if rank > 1: optimizer.step()")
    (text,) = on_ranks(four_ranks, "nbdist.sync(model, optimizer, src=3)")
    assert text == "[0-3] ranks 0-1 were behind: 4 parameters, 12 values of state, step 1 → 2"
    (text,) = on_ranks(four_ranks, "nbdist.check(model, optimizer)")
    assert text.startswith("[0-3] ranks 0-3 agree: 4 parameters")


def test_a_torn_replica_is_refused_and_a_whole_one_named(four_ranks: Kernel) -> None:
    on_ranks(four_ranks, "shape = (2, 2)" + FSDP + "if rank == 1: optimizer.step()")
    assert "pass src=2: its replica is whole" in usage_error(four_ranks, "nbdist.sync(model, optimizer)")
    on_ranks(four_ranks, "nbdist.sync(model, optimizer, src=2)")
    assert on_ranks(four_ranks, "nbdist.check(model, optimizer).equal") == ["[0-3] True"]


def test_a_group_limits_who_takes_part(four_ranks: Kernel) -> None:
    on_ranks(four_ranks, "import nbdist, torch\nimport torch.distributed as dist\npair = dist.new_group([2, 3])")
    code = "tensor = torch.full((2,), float(rank))\nnbdist.sync(tensor, src=3, group=pair) if rank > 1 else None"
    assert "[2-3] rank 2 was different: 1 parameter" in on_ranks(four_ranks, code)[0]
    assert on_ranks(four_ranks, "tensor[0].item()") == ["[0] 0.0\n[1] 1.0\n[2-3] 3.0"]
