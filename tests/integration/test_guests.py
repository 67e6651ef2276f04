"""Frameworks with a loop of their own, in cells on ranks: they train, stop, and are measured like our own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from testbed.kernel import Kernel, Outcome, both
from tests.support.screen import screen

pytest.importorskip("transformers")

SETUP = """%%distributed
import os
import nbdist, torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments
torch.set_num_threads(1)
rows = torch.randint(64, (64, 16), generator=torch.Generator().manual_seed(1))
data = [{"input_ids": row, "labels": row} for row in rows]

def model_of(seed=0):
    torch.manual_seed(seed)
    shape = dict(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4)
    return LlamaForCausalLM(LlamaConfig(**shape))

class Each(TrainerCallback):
    def __init__(self, do):
        self.do = do
    def on_step_end(self, arguments, state, control, **others):
        self.do(state.global_step)

def trainer_of(model, steps=8, do=lambda step: None, **arguments):
    chosen = dict(output_dir=folder, per_device_train_batch_size=4, max_steps=steps, learning_rate=1e-2,
                  save_strategy="no", report_to=[], dataloader_pin_memory=False, ddp_find_unused_parameters=False)
    return Trainer(model, TrainingArguments(**chosen | arguments), train_dataset=data, callbacks=[Each(do)])
"""


@pytest.fixture(scope="module")
def guests(ranks: Kernel, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kernel]:
    """Two ranks with transformers' Trainer."""
    ranks.ok(f"%%distributed\nfolder = {str(tmp_path_factory.mktemp('trainer'))!r}")
    ranks.ok(SETUP)
    ranks.ok("import nbdist")
    yield ranks


def values(kernel: Kernel, expression: str) -> Any:
    """Return what an expression is worth on all ranks, which agree."""
    zero, one = kernel.value(f"nbdist.get_session().pull({expression!r})")
    assert zero == one
    return zero


def interrupted(kernel: Kernel, code: str, at: str) -> Outcome:
    cell = kernel.start(f"%%distributed\n{code}")
    cell.wait_for_ranks(2, at)
    kernel.interrupt()
    outcome = cell.finish()
    assert outcome.ename == "KeyboardInterrupt", str(outcome)
    return outcome


# --- transformers' Trainer


def test_a_trainer_on_two_ranks_trains_like_one_process_with_both_batches(guests: Kernel) -> None:
    guests.ok(
        "%%distributed\nmodel, trained = model_of(), []\ntrainer = trainer_of(model)\n"
        "def collate(items):\n"
        "    trained.append(torch.stack([item['input_ids'] for item in items]))\n"
        "    return {'input_ids': trained[-1], 'labels': trained[-1]}\n"
        "trainer.data_collator = collate\n_ = trainer.train()"
    )
    guests.ok(
        "%%distributed\nhalves = [None, None]\ndist.all_gather_object(halves, trained)\n"
        "alone = model_of()\noptimizer = trainer_of(alone).create_optimizer()\n"
        "for step, batch in enumerate(map(torch.cat, zip(*halves))):\n"
        "    for group in optimizer.param_groups: group['lr'] = 1e-2 * (8 - step) / 8\n"
        "    alone(input_ids=batch, labels=batch).loss.backward()\n"
        "    torch.nn.utils.clip_grad_norm_(alone.parameters(), 1.0)\n"
        "    optimizer.step(); optimizer.zero_grad()\n"
        "pairs = zip(model.parameters(), alone.parameters())\n"
        "apart = max((one - other).abs().max().item() for one, other in pairs)"
    )
    assert values(guests, "trainer.state.global_step") == 8
    assert values(guests, "apart") < 1e-5


def test_an_interrupt_stops_a_trainer_after_the_same_step_on_all_ranks_and_it_trains_on(guests: Kernel) -> None:
    guests.ok(
        "%%distributed\nmodel = model_of()\n"
        "trainer = trainer_of(model, 100_000, lambda step: step == 20 and print('on'))"
    )
    outcome = interrupted(guests, "trainer.train()", "on")
    assert outcome.evalue.startswith("all ranks stopped after step"), str(outcome)
    assert values(guests, "trainer.state.global_step") >= 20
    guests.ok("%%distributed\nreport = nbdist.check(model)\nassert report.equal, report")
    guests.ok("%%distributed\ntrainer = trainer_of(model, 4)\n_ = trainer.train()\nassert nbdist.check(model).equal")
    assert values(guests, "trainer.state.global_step") == 4


def test_an_interrupted_trainer_resumes_from_its_last_checkpoint(guests: Kernel) -> None:
    guests.ok(
        "%%distributed\nmodel, saving = model_of(), dict(save_strategy='steps', save_steps=5)\n"
        "def wait(step):\n"
        "    if step == 12: print('on'); dist.recv(torch.ones(1), 1 - rank)\n"
        "trainer = trainer_of(model, 40, wait, **saving)"
    )
    interrupted(guests, "trainer.train()", "on")
    guests.ok(
        "%%distributed\nsteps = []\ntrainer = trainer_of(model_of(7), 40, steps.append, **saving)\n"
        "_ = trainer.train(resume_from_checkpoint=f'{folder}/checkpoint-10')\nresumed = trainer.model"
    )
    assert values(guests, "steps") == list(range(11, 41))
    guests.ok(
        "%%distributed\nwhole = model_of()\n_ = trainer_of(whole, 40).train()\n"
        "apart = max((one - other).abs().max().item() for one, other in zip(resumed.parameters(), whole.parameters()))"
    )
    assert values(guests, "apart") < 1e-6


@pytest.mark.torch_private
def test_ranks_stuck_in_a_trainer_are_freed_and_train_on(guests: Kernel) -> None:
    """Rank 1 waits for a message that nobody sends, rank 0 for its gradients."""
    guests.ok(
        "%%distributed\nmodel = model_of()\n"
        "def wait(step):\n"
        "    if step == 3:\n"
        "        print('three')\n"
        "        if rank: dist.recv(torch.ones(1), 0)\n"
        "trainer = trainer_of(model, 20, wait)"
    )
    outcome = interrupted(guests, "trainer.train()", "three")
    assert "nbdist: process groups rebuilt" in outcome.traceback, str(outcome)
    guests.ok("%%distributed\nnbdist.sync(model)\n_ = trainer_of(model, 4).train()\nassert nbdist.check(model).equal")


def test_the_bar_of_a_trainer_is_shown_for_the_rank_that_draws_it(guests: Kernel) -> None:
    outcome = guests.ok("%%distributed\n_ = trainer_of(model_of()).train()")
    shown = screen(outcome.stdout + outcome.stderr)
    assert any(line.startswith("[0]") and "8/8" in line for line in shown), shown
    assert not any(line.startswith("[1]") and "8/8" in line for line in shown), shown


def test_a_trainer_logs_on_rank_0_alone(guests: Kernel) -> None:
    guests.ok("%%distributed\ntrainer = trainer_of(model_of(), logging_steps=4)\n_ = trainer.train()")
    assert values(guests, "[entry['step'] for entry in trainer.state.log_history]") == [4, 8, 8]


def test_a_trainer_evaluates_over_all_ranks(guests: Kernel) -> None:
    guests.ok("%%distributed\nmodel = model_of()\nfound = trainer_of(model).evaluate(data)['eval_loss']")
    guests.ok("%%distributed\nwith torch.no_grad(): wanted = model(input_ids=rows, labels=rows).loss.item()")
    assert values(guests, "abs(found - wanted)") < 1e-5


def test_a_step_of_a_trainer_has_the_flops_of_the_model_in_a_plain_loop(guests: Kernel) -> None:
    guests.ok("from nbdist.client.ranks.observers import Observer, subscribe")
    guests.ok("class Laps(Observer):\n    def cell_ended(self, task): self.replies = task.replies")
    guests.ok("laps = Laps(); unsubscribe = subscribe(laps)")
    guests.ok("%distributed tflops on")
    try:
        guests.ok("%%distributed\n_ = trainer_of(model_of(), 32).train()")
        guest = kept_flops(guests)
        guests.ok(
            "%%distributed\nplain = DistributedDataParallel(model_of())\n"
            "optimizer = torch.optim.AdamW(plain.parameters())\n"
            "for step in range(32):\n"
            "    plain(input_ids=rows[:4], labels=rows[:4]).loss.backward()\n"
            "    optimizer.step(); optimizer.zero_grad()"
        )
        assert guest == kept_flops(guests) and all(guest)
    finally:
        guests.ok("%distributed tflops off")
        guests.ok("unsubscribe()")


def kept_flops(kernel: Kernel) -> list[Any]:
    """Return the model FLOPs of a step of the last cell, by rank."""
    return list(kernel.value("[r.steps.flops for _, r in sorted(laps.replies.items())]"))


def test_the_memory_of_a_trainer_s_cell_is_shown_for_each_rank(guests: Kernel) -> None:
    outcome = guests.ok("%%memory\n%%distributed\n_ = trainer_of(model_of()).train()")
    (memory,) = [
        content["metadata"]["nbdist"]["memory"]
        for kind, content in outcome.events
        if kind == "display_data" and "memory" in content["metadata"].get("nbdist", {})
    ]
    assert sorted(memory["ranks"]) == ["0", "1"]


def test_a_trainer_follows_the_plan_s_precision(guests: Kernel) -> None:
    guests.ok("%distributed plan --precision bf16")
    try:
        guests.ok("%%distributed\nprecision = trainer_of(model_of()).accelerator.mixed_precision")
        assert values(guests, "precision") == "bf16"
    finally:
        guests.ok("%distributed plan --reset")


def test_a_trainer_saves_a_model_that_loads(guests: Kernel, tmp_path: Path) -> None:
    guests.ok(
        f"%%distributed\ntrainer = trainer_of(model_of())\n_ = trainer.train()\ntrainer.save_model({str(tmp_path)!r})"
    )
    assert guests.ok(
        f"%%distributed\nnbdist.wait_for_everyone()\nagain = LlamaForCausalLM.from_pretrained({str(tmp_path)!r})\n"
        "print(all(torch.equal(a, b) for a, b in zip(again.parameters(), trainer.model.parameters())))"
    ).lines == both("True")
