"""DeepSpeed's engines in cells on ranks: they train like one process, stop whole, are freed, healed, and measured."""

from __future__ import annotations

import importlib.util
import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from testbed.kernel import Kernel, wait_until

if importlib.util.find_spec("deepspeed") is None:  # its import here would look for GPUs
    pytest.skip("DeepSpeed isn't installed", allow_module_level=True)

SETUP = """%%distributed
import logging, os, warnings
os.environ["DS_ACCELERATOR"] = "cpu"
import deepspeed, nbdist, torch, torch.distributed as dist
deepspeed.logger.setLevel(logging.ERROR)
warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # its sums of CPUs are compiled when first used
torch.set_num_threads(1)
rows = torch.randn(64, 8, generator=torch.Generator().manual_seed(1))

def model_of(seed=0):
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))

def optimizer_of(model):
    weights = [p for p in model.parameters() if p.dim() > 1]
    biases = [p for p in model.parameters() if p.dim() == 1]
    return torch.optim.Adam([{"params": weights}, {"params": biases, "lr": 0.02}], 0.01)

def engine_of(stage, seed=0, accumulation=1):
    model = model_of(seed)
    config = {
        "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": accumulation, "gradient_clipping": 0.0,
        "steps_per_print": 10**9, "zero_allow_untested_optimizer": True, "zero_optimization": {"stage": stage},
    }
    return deepspeed.initialize(model=model, optimizer=optimizer_of(model), config=config)[0]

def loss_of(model, step, half=None):
    batch = rows.roll(step * 8, 0)[:8]
    batch = batch if half is None else batch.chunk(2)[half]
    return (model(batch) - batch.sum(1, keepdim=True)).square().mean()

def train(engine, steps, first=0, do=lambda step: None):
    for step in range(first, first + steps):
        engine.backward(loss_of(engine, step, rank))
        do(step)
        engine.step()

def alone(steps):
    model = model_of()
    optimizer = optimizer_of(model)
    for step in range(steps):
        loss_of(model, step).backward()
        optimizer.step(); optimizer.zero_grad()
    return model

def whole(engine):
    parameters = list(engine.module.parameters())
    with deepspeed.zero.GatheredParameters(parameters, enabled=hasattr(parameters[0], "ds_id")):
        return [parameter.detach().clone() for parameter in parameters]

def apart(one, other):
    return max((a - b).abs().max().item() for a, b in zip(one, other, strict=True))
"""
STAGES = [0, 1, 2, 3]


@pytest.fixture(scope="module")
def guests(ranks: Kernel, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kernel]:
    """Two ranks with DeepSpeed."""
    ranks.ok(f"folder = {str(tmp_path_factory.mktemp('deepspeed'))!r}\nimport nbdist")
    ranks.ok("nbdist.get_session().push({'folder': folder})")
    ranks.ok(SETUP)
    yield ranks


def values(kernel: Kernel, expression: str) -> Any:
    """Return what an expression is worth on all ranks, which agree."""
    zero, one = kernel.value(f"nbdist.get_session().pull({expression!r})")
    assert zero == one
    return zero


@pytest.mark.parametrize("stage", STAGES)
def test_an_engine_trains_like_one_process_with_both_batches(guests: Kernel, stage: int) -> None:
    guests.ok(f"%%distributed\nengine = engine_of({stage})\ntrain(engine, 8)")
    guests.ok("%%distributed\ndifference = apart(whole(engine), alone(8).parameters())")
    assert values(guests, "engine.global_steps") == 8 and values(guests, "difference") < 1e-5


@pytest.mark.parametrize("stage", STAGES)
def test_an_interrupt_stops_it_after_the_same_whole_step(guests: Kernel, stage: int) -> None:
    guests.ok(f"%%distributed\nengine = engine_of({stage})\nwatch = lambda step: step == 20 and print('on')")
    cell = guests.start("%%distributed\ntrain(engine, 1_000_000, 0, watch)")
    cell.wait_for_ranks(2, "on")
    guests.interrupt()
    outcome = cell.finish()
    assert outcome.ename == "KeyboardInterrupt" and outcome.evalue.startswith("all ranks stopped after step")
    steps = values(guests, "engine.global_steps")
    assert steps >= 20 and values(guests, "engine.micro_steps") == steps
    guests.ok("%%distributed\nassert nbdist.check(whole(engine)).equal")
    guests.ok(
        f"%%distributed\ntrain(engine, 3, {steps})\ndifference = apart(whole(engine), alone({steps + 3}).parameters())"
    )
    assert values(guests, "difference") < 1e-4


def test_an_interrupt_counts_an_update_of_gathered_gradients_as_one_step(guests: Kernel) -> None:
    guests.ok("%%distributed\nengine = engine_of(2, accumulation=2)")
    cell = guests.start("%%distributed\ntrain(engine, 1_000_000, 0, lambda step: step == 20 and print('on'))")
    cell.wait_for_ranks(2, "on")
    guests.interrupt()
    assert cell.finish().evalue.startswith(f"all ranks stopped after step {values(guests, 'engine.global_steps')}")
    assert values(guests, "engine.micro_steps") == 2 * values(guests, "engine.global_steps")
    guests.ok("%%distributed\nassert nbdist.check(whole(engine)).equal")


@pytest.mark.torch_private
@pytest.mark.parametrize("stage", [2, 3])
def test_ranks_stuck_in_it_are_freed_and_another_engine_trains(guests: Kernel, stage: int) -> None:
    """Rank 1 waits for a message that nobody sends, rank 0 for its gradients."""
    guests.ok(f"%%distributed\nengine = engine_of({stage})\ntrain(engine, 2)\nengine.save_checkpoint(folder)")
    cell = guests.start(
        "%%distributed\ndef wait(step):\n"
        "    if step == 3:\n"
        "        print('three')\n"
        "        if rank: dist.recv(torch.ones(1), 0)\n"
        "train(engine, 20, 2, wait)"
    )
    cell.wait_for_ranks(2, "three")
    guests.interrupt()
    outcome = cell.finish()
    assert "nbdist: process groups rebuilt" in str(outcome) and "call `deepspeed.initialize` again" in str(outcome)
    guests.ok(f"%%distributed\nengine = engine_of({stage}, seed=7)\n_ = engine.load_checkpoint(folder)")
    guests.ok("%%distributed\ntrain(engine, 6, 2)\ndifference = apart(whole(engine), alone(8).parameters())")
    assert values(guests, "engine.global_steps") == 8 and values(guests, "difference") < 1e-5


def test_the_memory_of_its_cell_is_shown_for_each_rank(guests: Kernel) -> None:
    outcome = guests.ok("%%memory\n%%distributed\ntrain(engine_of(3), 4)")
    (memory,) = [
        content["metadata"]["nbdist"]["memory"]
        for kind, content in outcome.events
        if kind == "display_data" and "memory" in content["metadata"].get("nbdist", {})
    ]
    assert sorted(memory["ranks"]) == ["0", "1"]


def test_a_step_of_it_has_the_flops_of_the_model_in_a_plain_loop(guests: Kernel) -> None:
    guests.ok("from nbdist.client.ranks.observers import Observer, subscribe")
    guests.ok("class Laps(Observer):\n    def cell_ended(self, task): self.replies = task.replies")
    guests.ok("laps = Laps(); unsubscribe = subscribe(laps)")
    guests.ok("%distributed tflops on")
    try:
        guests.ok(
            "%%distributed\nmodel = model_of()\noptimizer = optimizer_of(model)\n"
            "for step in range(32):\n"
            "    loss_of(model, step, rank).backward()\n"
            "    optimizer.step(); optimizer.zero_grad()"
        )
        plain = laps_of(guests)
        for stage in STAGES:
            guests.ok(f"%%distributed\nengine = engine_of({stage})\ntrain(engine, 32)")
            assert laps_of(guests) == plain and all(flops for _, flops in plain)
    finally:
        guests.ok("%distributed tflops off")
        guests.ok("unsubscribe()")


def laps_of(kernel: Kernel) -> list[Any]:
    """Return the steps of the last cell, and the model FLOPs of one, by rank."""
    return list(kernel.value("[(r.steps.steps, r.steps.flops) for _, r in sorted(laps.replies.items())]"))


@pytest.mark.parametrize(
    "call",
    [
        "nbdist.check(engine.module)",
        "nbdist.check(list(engine.module.parameters()))",
        "nbdist.check(engine.module[0].weight)",
        "nbdist.save_model(engine.module, f'{folder}/weights')",
    ],
)
def test_parameters_that_it_has_partitioned_are_taken_for_no_whole_ones(guests: Kernel, call: str) -> None:
    guests.ok("%%distributed\nengine = engine_of(3)")
    error = guests.fails(f"%%distributed\n{call}", "RankError").traceback
    assert "ZeRO-3" in error and "deepspeed.zero.GatheredParameters" in error and "engine.save_checkpoint" in error


def test_they_are_compared_and_saved_where_they_are_gathered(guests: Kernel) -> None:
    guests.ok(
        "%%distributed\nengine = engine_of(3)\ntrain(engine, 4)\n"
        "with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):\n"
        "    assert nbdist.check(engine.module).equal\n"
        "    _ = nbdist.save_model(engine.module, f'{folder}/gathered')\n"
        "model = model_of(3)\nnbdist.load_model(model, f'{folder}/gathered')\n"
        "assert apart(whole(engine), model.parameters()) == 0"
    )


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("call", ["sync(engine.module)", "load_model(engine.module, there)", "prepare(engine.module)"])
def test_parameters_that_its_next_step_would_overwrite_are_not_set(guests: Kernel, call: str, stage: int) -> None:
    guests.ok("%%distributed\nthere = f'{folder}/there'\n_ = nbdist.save_model(model_of(), there)")
    guests.ok(f"%%distributed\nengine = engine_of({stage})")
    error = guests.fails(f"%%distributed\nnbdist.{call}", "RankError").traceback
    assert "before `deepspeed.initialize`" in error and "engine.load_checkpoint" in error


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_whole_parameters_are_compared(guests: Kernel, stage: int) -> None:
    guests.ok(f"%%distributed\nengine = engine_of({stage})\nassert nbdist.check(engine.module).equal")
    error = guests.fails("%%distributed\nnbdist.check(engine)", "RankError").traceback
    assert "compare engine.module" in error


def test_a_new_engine_is_made_after_a_heal(guests: Kernel) -> None:
    guests.ok("%%distributed\nengine = engine_of(3)\ntrain(engine, 2)")  # which puts a `linear` of its own in place
    os.kill(guests.rank_pids()[1], signal.SIGKILL)
    wait_until(lambda: not _both_live(guests), "the death to be known")
    guests.ok("%distributed heal")
    guests.ok("nbdist.get_session().push({'folder': folder})")
    guests.ok(SETUP)
    for stage in STAGES:
        guests.ok(f"%%distributed\nengine = engine_of({stage})\ntrain(engine, 8)")
        guests.ok("%%distributed\ndifference = apart(whole(engine), alone(8).parameters())")
        assert values(guests, "difference") < 1e-5


def _both_live(kernel: Kernel) -> bool:
    found = "__import__('tests.support.inside').support.inside.living(__import__('nbdist').get_session())"
    return list(kernel.value(found)) == [0, 1]
