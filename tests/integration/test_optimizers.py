"""Optimizers that people try first: they train and resume under every strategy, or are refused before anything is."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import nbdist
from nbdist.plan import Plan
from nbdist.train import state
from testbed.kernel import Kernel
from tests.support.cells import on_ranks, refused, value

SETUP = "import torch, nbdist\nfrom nbdist.plan import Plan\nfrom tests.support.train_optimizers import *"


@pytest.fixture(autouse=True)
def _names(ranks: Kernel) -> Iterator[None]:
    on_ranks(ranks, SETUP)
    yield
    on_ranks(ranks, "model = optimizer = None; _ = nbdist.free_memory()")
    state.forget()


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "hsdp"])
@pytest.mark.parametrize(
    "kind",
    [
        pytest.param("Muon", marks=pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="not in this torch")),
        "Lion",
        "TwoModes",
    ],
)
def test_a_training_with_windows_and_clipping_resumes_bit_for_bit(
    ranks: Kernel, tmp_path: Path, kind: str, strategy: str
) -> None:
    assert value(ranks, f"resumed({kind!r}, {str(tmp_path / 'a')!r}, {strategy!r})") == "(False, True)"


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "hsdp"])
def test_forwards_see_what_the_mode_of_an_optimizer_has_made_of_the_parameters(ranks: Kernel, strategy: str) -> None:
    code = f"""
model, optimizer = made("TwoModes", Plan(strategy={strategy!r}))
sample = batch()
with torch.no_grad():
    first = model(sample)
    optimizer.eval()
    other = model(sample)
    optimizer.train()
    again = model(sample)
torch.equal(first, other), torch.equal(first, again)"""
    assert value(ranks, code) == "(False, True)"


@pytest.mark.parametrize("strategy", ["fsdp", "hsdp"])
def test_an_optimizer_that_can_not_be_sharded_is_refused_on_all_ranks(ranks: Kernel, strategy: str) -> None:
    told = refused(ranks, f"made('Adafactor', Plan(strategy={strategy!r}))")
    assert "torch's Adafactor can't step sharded parameters" in told and "or set strategy to 'ddp'" in told
    assert value(ranks, "from nbdist.train import state; len(state.current().models)") == "0"


def test_a_step_that_can_not_mix_shards_with_whole_tensors_says_what_to_do(ranks: Kernel) -> None:
    told = refused(ranks, "steps(*made('Whole', Plan(strategy='fsdp')), 1)")
    assert "the step of Whole failed on sharded parameters (DTensors)" in told and "set strategy to 'ddp'" in told


def test_it_steps_whole_parameters(ranks: Kernel) -> None:
    code = (
        "model, optimizer = made('Whole', Plan(strategy='ddp')); steps(model, optimizer, 1)\nlen(optimizer.state) > 0"
    )
    assert value(ranks, code) == "True"


def test_what_an_optimizer_raises_itself_is_passed_on(ranks: Kernel) -> None:
    outcome = ranks.fails("%%distributed\nsteps(*made('Diverging', Plan(strategy='fsdp')), 1)", "RankError")
    assert "RuntimeError: the loss is NaN" in outcome.evalue


def test_it_trains_under_ddp(ranks: Kernel, tmp_path: Path) -> None:
    assert value(ranks, f"resumed('Adafactor', {str(tmp_path / 'a')!r}, 'ddp')") == "(False, True)"


# --- torchao


def quantized_training(plan: Plan) -> tuple[nn.Module, torch.optim.Optimizer]:
    from torchao.optim import AdamW8bit  # type: ignore[import-not-found,import-untyped,unused-ignore]

    torch.manual_seed(0)
    model = nn.Linear(128, 64)
    return nbdist.prepare(model, AdamW8bit(model.parameters(), lr=1e-2), plan=plan)


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    nbdist.backward(model(torch.ones(2, 128)).square().mean())
    optimizer.step()
    optimizer.zero_grad()


def test_quantized_state_is_quantized_again_after_loading(tmp_path: Path) -> None:
    pytest.importorskip("torchao")
    plan = Plan(strategy="none")
    torch.compiler.set_default_backend("eager")
    try:
        model: Any
        model, optimizer = quantized_training(plan)
        step(model, optimizer)
        nbdist.save_state(tmp_path / "a")
        step(model, optimizer)
        expected = model.weight.detach().clone()
        model, optimizer = quantized_training(plan)
        nbdist.load_state(tmp_path / "a")
        assert type(optimizer.state[model.weight]["exp_avg"]).__name__ == "OptimState8bit"
        step(model, optimizer)
        torch.testing.assert_close(model.weight, expected, rtol=0, atol=1e-3)  # a tenth of a step: codes may be others
    finally:
        torch.compiler.set_default_backend(None)
