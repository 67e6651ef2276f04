"""Averaged weights: swapped in and put back, kept by checkpoints, and refused where there are none."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

import nbdist
from nbdist.plan import Plan
from nbdist.train import state
from testbed.kernel import Kernel
from tests.support.cells import on_ranks, refused, value
from tests.support.train_models import Net, values

SETUP = """
import torch, nbdist
from nbdist.plan import Plan
from nbdist.train import state
from tests.support.train_models import *

def average_of(model):
    with nbdist.averaged(model):
        return values(model)

def after(strategy, count, **settings):
    model, optimizer = prepared(strategy, ema=0.5, **settings)
    for _ in range(count): step(model, optimizer)
    return model, optimizer
"""
STRATEGIES = ["ddp", "fsdp", "hsdp"]


@pytest.fixture(autouse=True)
def _names(ranks: Kernel) -> Iterator[None]:
    on_ranks(ranks, SETUP)
    yield
    on_ranks(ranks, "model = optimizer = None; _ = nbdist.free_memory()")


@pytest.fixture
def alone() -> Iterator[None]:
    yield
    state.forget()


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_weights_are_put_back_even_if_the_body_raises(ranks: Kernel, strategy: str) -> None:
    code = f"""
model, optimizer = after({strategy!r}, 3)
before = values(model)
try:
    with nbdist.averaged(model):
        inside = values(model)
        model(batch(rank))
        raise KeyError
except KeyError: pass
torch.equal(values(model), before), torch.equal(inside, before), torch.equal(average_of(model), inside)"""
    assert value(ranks, code) == "(True, False, True)"


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_forwards_inside_and_behind_see_the_weights_that_are_there(ranks: Kernel, strategy: str) -> None:
    code = f"""
model, optimizer = after({strategy!r}, 3)
sample = batch()
with torch.no_grad():
    before = model(sample)
    with nbdist.averaged(model): inside = model(sample)
    behind = model(sample)
torch.equal(before, behind), torch.equal(before, inside)"""
    assert value(ranks, code) == "(True, False)"


def test_a_step_that_fp16_skips_is_not_averaged(ranks: Kernel) -> None:
    code = """
model, optimizer = after("ddp", 2, precision="fp16")
before = average_of(model)
nbdist.backward(model(batch(rank)).square().mean() * float("inf"))
optimizer.step()
nbdist.optimizer_step_was_skipped(), torch.equal(average_of(model), before)"""
    assert value(ranks, code) == "(True, True)"


def test_only_the_last_micro_batch_of_a_window_is_averaged(ranks: Kernel) -> None:
    code = """
model, optimizer = after("fsdp", 2, accumulate=2)
first = torch.equal(average_of(model), values(model))
for _ in range(2): step(model, optimizer)
first, torch.equal(average_of(model), values(model))"""
    assert value(ranks, code) == "(True, False)"


def test_averages_of_half_precision_weights_follow_small_steps(alone: None) -> None:
    model = nn.Linear(1, 1, bias=False, dtype=torch.bfloat16)
    optimizer = torch.optim.SGD(model.parameters(), 2.0**-7)
    model, optimizer = nbdist.prepare(model, optimizer, plan=Plan(strategy="none", ema=0.999))
    nn.init.ones_(model.weight)
    for _ in range(20):
        model.weight.grad = torch.full_like(model.weight, -1.0)
        optimizer.step()
    (average,) = state.current().averages.values()
    expected = 1 + 2.0**-7
    for number in range(2, 21):
        expected += 0.001 * (1 + number * 2.0**-7 - expected)
    assert average.item() == pytest.approx(expected, rel=1e-6)


def test_before_the_first_step_the_weights_are_their_own_average(ranks: Kernel) -> None:
    assert value(ranks, "model, _ = after('fsdp', 0); torch.equal(average_of(model), values(model))") == "True"


# --- checkpoints and files


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_run_that_was_loaded_goes_on_with_the_same_averages(ranks: Kernel, tmp_path: Path, strategy: str) -> None:
    code = f"""
model, optimizer = after({strategy!r}, 2)
nbdist.save_state({str(tmp_path)!r} + "/a")
for _ in range(2): step(model, optimizer)
expected = average_of(model)
model, optimizer = after({strategy!r}, 1)
nbdist.load_state({str(tmp_path)!r} + "/a")
for _ in range(2): step(model, optimizer)
torch.equal(average_of(model), expected)"""
    assert value(ranks, code) == "True"


def test_averages_of_shards_load_into_one_process(ranks: Kernel, tmp_path: Path, alone: None) -> None:
    on_ranks(ranks, f"model, optimizer = after('fsdp', 3); _ = nbdist.save_state({str(tmp_path)!r} + '/a')")
    expected = ast.literal_eval(value(ranks, "average_of(model).tolist()"))
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    model, optimizer = nbdist.prepare(model, optimizer, plan=Plan(strategy="none", ema=0.5))
    with pytest.warns(UserWarning, match="the plan was different"):
        nbdist.load_state(tmp_path / "a")
    with nbdist.averaged(model):
        assert values(model).tolist() == expected


def test_a_plan_without_averages_loads_a_checkpoint_that_has_them(ranks: Kernel, tmp_path: Path) -> None:
    code = f"""
import warnings
warnings.simplefilter("ignore")
model, optimizer = after("fsdp", 2)
nbdist.save_state({str(tmp_path)!r} + "/a")
expected = values(model)
model, optimizer = prepared("fsdp")
report = nbdist.load_state({str(tmp_path)!r} + "/a")
torch.equal(values(model), expected), "ema" in str(report)"""
    assert value(ranks, code) == "(True, True)"


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_averaged_weights_are_exported(ranks: Kernel, tmp_path: Path, strategy: str) -> None:
    code = f"""
model, optimizer = after({strategy!r}, 3)
before, expected = values(model), average_of(model)
nbdist.save_model(model, {str(tmp_path)!r} + "/m", averaged=True)
untouched = torch.equal(values(model), before)
nbdist.load_model(model, {str(tmp_path)!r} + "/m")
untouched, torch.equal(values(model), expected)"""
    assert value(ranks, code) == "(True, True)"


# --- ranks a step apart


def test_averages_are_compared_and_brought_together(ranks: Kernel) -> None:
    code = """
model, optimizer = after("ddp", 3)
expected = average_of(model)
if rank == 1: [average.zero_() for average in state.current().averages.values()]
differs = nbdist.check(model)
nbdist.sync(model, optimizer)
bool(differs), "averaged" in differs.first, torch.equal(average_of(model), expected)"""
    assert value(ranks, code) == "(False, True, True)"


# --- what is refused


@pytest.mark.parametrize(
    ("code", "message"),
    [
        (
            "model, _ = prepared('ddp')\nwith nbdist.averaged(model): pass",
            "because the plan has no ema: use `%distributed",
        ),
        ("after('fsdp', 1)\nwith nbdist.averaged(Net()): pass", "of the Net are kept, because it was not prepared"),
        ("after('fsdp', 1)\nwith nbdist.averaged('m'): pass", "averaged takes a prepared model, not str"),
        ("m, _ = after('fsdp', 1)\nwith nbdist.averaged(m), nbdist.averaged(m): pass", "holds its averaged weights"),
        ("m, o = after('fsdp', 1)\nwith nbdist.averaged(m): o.step()", "call step() after it"),
        ("m, o = after('fsdp', 1)\nwith nbdist.averaged(m): nbdist.save_state('/tmp/x')", "save_state or load_state"),
        ("m, o = prepared('fsdp')\nnbdist.save_model(m, '/tmp/x', averaged=True)", "because the plan has no ema"),
    ],
)
def test_what_has_no_averages_is_refused_on_all_ranks(ranks: Kernel, code: str, message: str) -> None:
    assert message in refused(ranks, code)
