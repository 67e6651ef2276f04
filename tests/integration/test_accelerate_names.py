"""Code written for an Accelerator, with `nbdist` in its place: properties and methods mean the same."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from testbed.kernel import Kernel, both
from tests.support.cells import on_ranks, refused, value

SETUP = """
import logging, os, pickle, torch, nbdist
from nbdist.plan import Plan
from nbdist.train import state
from tests.support.train_models import *
"""


@pytest.fixture(autouse=True)
def _names(ranks: Kernel) -> None:
    on_ranks(ranks, SETUP)


@pytest.mark.parametrize(
    ("name", "expected"), [("is_main_process", 0), ("is_local_main_process", 0), ("is_last_process", 1)]
)
def test_who_this_is_can_be_asked_with_parentheses_and_without(ranks: Kernel, name: str, expected: int) -> None:
    code = f"""
bare = nbdist.{name}
nbdist.gather_object([(bool(bare), not bare, bare(), bare == True, str(bare), True if bare else False)])"""
    yes, no = (True, False, True, True, "True", True), (False, True, False, False, "False", False)
    assert ast.literal_eval(value(ranks, code)) == ([yes, no] if expected == 0 else [no, yes])


def test_sync_gradients_is_true_at_the_end_of_a_window_only(ranks: Kernel) -> None:
    code = """
model, optimizer = prepared(accumulate=2); told = []
for _ in range(4):
    with nbdist.accumulate(model):
        nbdist.backward(model(batch(rank)).square().mean())
        told.append((True if nbdist.sync_gradients else False, nbdist.sync_gradients()))
        optimizer.step(); optimizer.zero_grad()
told"""
    assert value(ranks, code) == "[(False, False), (True, True), (False, False), (True, True)]"


def test_a_flag_that_travels_is_asked_where_it_arrives(ranks: Kernel) -> None:
    code = "nbdist.gather_object([nbdist.broadcast_object_list([nbdist.is_main_process])[0]()])"
    assert value(ranks, code) == "[True, False]"


def test_places_are_plain_values(ranks: Kernel) -> None:
    code = """
mine = nbdist.process_index, nbdist.local_process_index, nbdist.num_processes, nbdist.split_batches
nbdist.device == device, nbdist.gather_object([mine])"""
    assert value(ranks, code) == "(True, [(0, 0, 2, False), (1, 1, 2, False)])"


def test_functions_run_on_the_ranks_that_are_named(ranks: Kernel) -> None:
    code = """
def who(): return rank
decorated = [nbdist.on_process(who, process_index=1), nbdist.on_process(process_index=1)(who),
             nbdist.on_local_main_process(who), nbdist.on_main_process(who)]
nbdist.gather_object([[run() for run in decorated]])"""
    assert value(ranks, code) == "[[None, None, 0, 0], [1, 1, None, None]]"


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_no_sync_puts_the_exchange_off_to_the_next_backward(ranks: Kernel, strategy: str) -> None:
    code = f"""
def gradients(apart):
    model, optimizer = prepared({strategy!r})
    for inside in (apart, False):
        with nbdist.no_sync(model) if inside else torch.enable_grad():
            nbdist.backward(model(batch(rank)).square().mean())
        if inside and {strategy!r} == "ddp":
            print(len(set(nbdist.gather_object([model.module.embed.weight.grad.sum().item()]))))
    return torch.cat([whole(p.grad).flatten() for p in model.parameters()])
torch.allclose(gradients(True), gradients(False), rtol=1e-5)"""
    outcome = ranks.ok(f"%%distributed\n{code}")
    assert outcome.plain == ["[0-1] True"]
    assert outcome.lines == (both("2") if strategy == "ddp" else {})


def test_a_step_that_fp16_left_out_shows(ranks: Kernel) -> None:
    code = """
import warnings
model, optimizer = prepared(precision="fp16"); told = []
for factor in (1.0, float("inf"), 1.0):
    nbdist.backward(model(batch(rank)).square().mean() * factor)
    with warnings.catch_warnings(): warnings.simplefilter("ignore"); optimizer.step()
    optimizer.zero_grad(); told.append((bool(nbdist.optimizer_step_was_skipped), nbdist.optimizer_step_was_skipped()))
told[1:]"""
    assert value(ranks, code) == "[(True, True), (False, False)]"


def test_unscaled_gradients_are_those_of_the_loss(ranks: Kernel) -> None:
    code = """
def gradients(precision):
    model, optimizer = prepared(precision=precision)
    nbdist.backward(model(batch(rank)).square().mean())
    nbdist.unscale_gradients(); nbdist.unscale_gradients(optimizer)
    found = torch.cat([p.grad.flatten() for p in model.parameters()])
    optimizer.step()
    return found
torch.allclose(gradients("fp16"), gradients("fp32"), rtol=0.05, atol=1e-3)"""
    assert value(ranks, code) == "True"
    other = "nbdist.unscale_gradients(torch.optim.SGD(Net().parameters(), 0.1))"
    assert "unscale_gradients was given a SGD that was not prepared" in refused(ranks, other)


def test_save_writes_once(ranks: Kernel, tmp_path: Path) -> None:
    code = f"""
nbdist.save({{"weight": torch.full((2,), float(rank))}}, "{tmp_path}/plain.pt")
nbdist.save({{"weight": torch.full((2,), float(rank))}}, "{tmp_path}/safe.safetensors", safe_serialization=True)
nbdist.wait_for_everyone()
from safetensors.torch import load_file
torch.load("{tmp_path}/plain.pt")["weight"].tolist(), load_file("{tmp_path}/safe.safetensors")["weight"].tolist()"""
    assert value(ranks, code) == "([0.0, 0.0], [0.0, 0.0])"


def test_a_logger_speaks_once_or_in_the_order_of_ranks(ranks: Kernel, tmp_path: Path) -> None:
    code = f"""
logger = nbdist.get_logger("nbdist-test", "INFO")
logger.logger.propagate = False
logger.logger.handlers = [handler := logging.FileHandler("{tmp_path}/log")]
handler.setFormatter(logging.Formatter(f"{{rank}} %(message)s at %(funcName)s"))
def here():
    logger.debug("not asked for")
    logger.info("once")
    logger.info("all %d", rank, main_process_only=False, in_order=True)
    for _ in range(2): logger.warning_once("warned")
here(); nbdist.wait_for_everyone()
logger.logger.handlers.clear(); handler.close()"""
    on_ranks(ranks, code)
    expected = ["0 once at here", "0 all 0 at here", "1 all 1 at here", "0 warned at here"]
    assert sorted((tmp_path / "log").read_text().splitlines()) == sorted(expected)


def test_a_tracker_can_be_had_for_more_than_numbers(ranks: Kernel, tmp_path: Path) -> None:
    code = f"""
nbdist.init_trackers("run", to="csv", folder="{tmp_path}")
nbdist.get_tracker("csv").log({{"loss": 1.0}}, 3)
nbdist.get_tracker("csv", unwrap=True).add({{"step": 4, "loss": 0.5}})
nbdist.end_training()"""
    on_ranks(ranks, code)
    assert (tmp_path / "run.csv").read_text().splitlines() == ["step,loss", "3,1.0", "4,0.5"]
    assert "no tracker named 'wandb' in this run (there are: none)" in refused(ranks, "nbdist.get_tracker('wandb')")
