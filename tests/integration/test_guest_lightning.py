"""Lightning in cells on ranks: its Trainer and Fabric train, stop, are freed, and resume like a loop of our own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from testbed.kernel import Kernel, both
from tests.support.screen import screen

pytest.importorskip("lightning")

SETUP = """%%distributed
import lightning, logging, nbdist, torch, torch.distributed as dist, warnings
from torch.utils.data import DataLoader, TensorDataset
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
warnings.simplefilter("ignore")
torch.set_num_threads(1)
rows = torch.randn(64, 8, generator=torch.Generator().manual_seed(1))
loader = DataLoader(TensorDataset(rows), batch_size=4)

class Small(lightning.LightningModule):
    def __init__(self, do=lambda step: None):
        super().__init__()
        torch.manual_seed(0)
        self.net = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))
        self.do, self.seen = do, []
    def training_step(self, batch, index):
        self.seen.append(batch[0])
        self.do(self.global_step)
        return (self.net(batch[0]) - batch[0].sum(1, keepdim=True)).square().mean()
    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), 0.01)

def trainer_of(**arguments):
    chosen = dict(accelerator="cpu", devices=2, strategy="ddp", max_epochs=2, logger=False,
                  enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
    return lightning.Trainer(**chosen | arguments)

def alone(batches):
    halves = [None, None]
    dist.all_gather_object(halves, list(batches))
    model = Small()
    optimizer = model.configure_optimizers()
    for batch in map(torch.cat, zip(*halves)):
        model.training_step((batch,), 0).backward()
        optimizer.step(); optimizer.zero_grad()
    return model

def apart(one, other):
    return max((a - b).abs().max().item() for a, b in zip(one.parameters(), other.parameters()))
"""


@pytest.fixture(scope="module")
def guests(ranks: Kernel, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kernel]:
    """Two ranks with Lightning."""
    ranks.ok(f"%%distributed\nfolder = {str(tmp_path_factory.mktemp('lightning'))!r}")
    ranks.ok(SETUP)
    ranks.ok("import nbdist")
    yield ranks


def values(kernel: Kernel, expression: str) -> Any:
    """Return what an expression is worth on all ranks, which agree."""
    zero, one = kernel.value(f"nbdist.get_session().pull({expression!r})")
    assert zero == one
    return zero


@pytest.mark.parametrize("strategy", ["ddp", "auto"])
def test_a_trainer_trains_like_one_process_with_both_batches(guests: Kernel, strategy: str) -> None:
    guests.ok(
        f"%%distributed\nmodel = Small()\ntrainer = trainer_of(strategy={strategy!r})\ntrainer.fit(model, loader)"
    )
    guests.ok("%%distributed\ndifference, steps = apart(model, alone(model.seen)), trainer.global_step")
    assert values(guests, "steps") == 16 and values(guests, "difference") < 1e-6


def test_fabric_trains_like_one_process_with_both_batches(guests: Kernel) -> None:
    guests.ok(
        "%%distributed\nfabric = lightning.Fabric(accelerator='cpu', devices=2, strategy='ddp')\nfabric.launch()\n"
        "plain = Small()\nmodel, optimizer = fabric.setup(plain.net, torch.optim.Adam(plain.parameters(), 0.01))\n"
        "batches = [batch for batch, in fabric.setup_dataloaders(loader)]\n"
        "for batch in batches:\n"
        "    fabric.backward((model(batch) - batch.sum(1, keepdim=True)).square().mean())\n"
        "    optimizer.step(); optimizer.zero_grad()\n"
        "difference = apart(plain, alone(batches))"
    )
    assert values(guests, "difference") < 1e-6


def test_an_interrupt_stops_it_after_the_same_step_and_it_trains_on(guests: Kernel) -> None:
    cell = guests.start(
        "%%distributed\nmodel = Small(lambda step: step == 20 and print('on'))\n"
        "trainer = trainer_of(max_epochs=100_000)\ntrainer.fit(model, loader)"
    )
    cell.wait_for_ranks(2, "on")
    guests.interrupt()
    cell.finish()
    assert values(guests, "trainer.global_step") >= 20
    guests.ok("%%distributed\nassert nbdist.check(model).equal\ntrainer = trainer_of()\ntrainer.fit(model, loader)")
    guests.ok("%%distributed\nassert nbdist.check(model).equal and trainer.global_step == 16")


@pytest.mark.torch_private
def test_ranks_stuck_in_it_are_freed_and_train_on(guests: Kernel) -> None:
    """Rank 1 waits for a message that nobody sends, rank 0 for its gradients."""
    cell = guests.start(
        "%%distributed\ndef wait(step):\n"
        "    if step == 3:\n"
        "        print('three')\n"
        "        if rank: dist.recv(torch.ones(1), 0)\n"
        "model = Small(wait)\ntrainer_of().fit(model, loader)"
    )
    cell.wait_for_ranks(2, "three")
    guests.interrupt()
    outcome = cell.finish()
    assert "nbdist: process groups rebuilt" in str(outcome)
    guests.ok("%%distributed\nmodel.do = lambda step: None\nnbdist.sync(model)\ntrainer_of().fit(model, loader)")
    guests.ok("%%distributed\nassert nbdist.check(model).equal")


def test_it_resumes_from_a_checkpoint(guests: Kernel) -> None:
    guests.ok(
        "%%distributed\ntrainer = trainer_of(max_epochs=1)\ntrainer.fit(Small(), loader)\n"
        "trainer.save_checkpoint(f'{folder}/one.ckpt')\n"
        "model, trainer = Small(), trainer_of(max_epochs=2)\n"
        "trainer.fit(model, loader, ckpt_path=f'{folder}/one.ckpt')\n"
        "whole = Small()\ntrainer_of(max_epochs=2).fit(whole, loader)\ndifference = apart(model, whole)"
    )
    assert values(guests, "trainer.global_step") == 16 and values(guests, "difference") < 1e-6


def test_its_bar_is_shown_for_the_rank_that_draws_it(guests: Kernel) -> None:
    outcome = guests.ok("%%distributed\ntrainer_of(max_epochs=1, enable_progress_bar=True).fit(Small(), loader)")
    shown = screen(outcome.stdout + outcome.stderr)
    assert any(line.startswith("[0]") and "8/8" in line for line in shown), shown
    assert not any(line.startswith("[1]") and "8/8" in line for line in shown), shown


@pytest.mark.parametrize("strategy", ["ddp_notebook", "ddp_fork"])
def test_a_strategy_that_starts_processes_on_each_rank_is_refused(guests: Kernel, strategy: str) -> None:
    code = f"%%distributed\ntrainer_of(strategy={strategy!r}).fit(Small(), loader)"
    assert "strategy='ddp' in place of 'ddp_notebook'" in guests.fails(code, "RankError").traceback
    assert guests.ok("%%distributed\nx = torch.ones(1)\ndist.all_reduce(x)\nprint(x.item())").lines == both("2.0")
