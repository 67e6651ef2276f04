"""What a session does when ranks die under a cell: `%distributed start --on-death`."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from testbed.kernel import Kernel, lines_by_rank
from tests.support.spare import spare_with_ranks

pytestmark = pytest.mark.torch_private

HANG = 60.0
# At each of `deaths`, (step, rank, whether in the optimizer's step), a rank dies once, when the other one has ended the
# last step that both can end: it may be slower.
TRAINING = """%%distributed --setup
import os, random, signal, time, torch, nbdist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, TensorDataset
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(8, 32), nn.Dropout(0.2), nn.ReLU(), nn.Linear(32, 1))
data = torch.randn(96, 8)
loader = DataLoader(TensorDataset(data, data.sum(1, keepdim=True)), batch_size=4, shuffle=True)
optimizer = torch.optim.AdamW(net.parameters(), 1e-2)
scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
model, optimizer, scheduler, loader = nbdist.prepare(net, optimizer, scheduler, loader)
torch.manual_seed(rank)
random.seed(rank)
deaths, folder, keeps = {deaths}, {folder!r}, {keeps!r}
def may_die(in_step):
    mark = f'{{folder}}/{{scheduler.last_epoch}}'
    if (scheduler.last_epoch, rank, in_step) in deaths and not os.path.exists(mark):
        open(mark, 'x').close()
        while not os.path.exists(f'{{folder}}/{{1 - rank}} at {{scheduler.last_epoch + in_step}}'):
            time.sleep(0.001)
        os.kill(os.getpid(), signal.SIGKILL)
optimizer.register_step_pre_hook(lambda *_: may_die(True))
def train():
    for x, y in loader:
        optimizer.zero_grad()
        loss = (model(x) - y).square().mean()
        may_die(False)
        loss.backward()
        optimizer.step()
        scheduler.step()
        open(f'{{folder}}/{{rank}} at {{scheduler.last_epoch}}', 'w').close()
        if keeps == 'save' and scheduler.last_epoch == 4:
            nbdist.save_state(f'{{folder}}/states/step-4')
        if keeps == 'replicate' and scheduler.last_epoch % 5 == 0:
            nbdist.replicate()
"""
RESULT = """%%distributed
whole = [p.full_tensor() if isinstance(p, DTensor) else p for p in model.parameters()]
print(*[p.double().abs().sum().item().hex() for p in whole], scheduler.get_last_lr(), torch.rand(1), random.random())
"""


def result(kernel: Kernel) -> dict[int, list[str]]:
    return lines_by_rank(kernel.ok(RESULT, HANG).stdout)


@pytest.mark.parametrize(
    ("plan", "deaths", "keeps", "goes_on"),
    [
        (
            "ddp",
            [(3, 1, False), (4, 0, True)],
            "",
            ["step 3, with the state of rank 0", "step 5, with the state of rank 1"],
        ),
        ("fsdp", [(6, 1, False)], "save", ["step 4: loaded "]),
        ("fsdp", [(6, 1, False), (7, 0, True)], "replicate", ["step 5: the last copies", "step 5: the last copies"]),
    ],
)
def test_a_training_goes_on_by_itself_and_ends_as_if_no_rank_had_died(
    plan: str, deaths: list[tuple[int, int, bool]], keeps: str, goes_on: list[str], tmp_path: Path
) -> None:
    with spare_with_ranks(2, "--exact --on-death heal") as kernel:
        kernel.ok(f"%distributed plan {plan}")
        kernel.ok(TRAINING.format(deaths=deaths, folder=str(tmp_path), keeps=keeps))
        said = kernel.ok("%%distributed\ntrain()", HANG).stdout
        went_on = [line.partition("training continues from ")[2] for line in said.splitlines() if " continues " in line]
        assert len(went_on) == len(goes_on)
        assert all(line.startswith(words) for line, words in zip(went_on, goes_on, strict=True)), went_on
        healed = result(kernel)
        kernel.ok("%distributed restart")
        kernel.ok(TRAINING.format(deaths=[], folder=str(tmp_path), keeps=keeps))
        kernel.ok("%%distributed\ntrain()", HANG)
        assert result(kernel) == healed


def test_a_cell_that_trains_nothing_is_not_run_again() -> None:
    with spare_with_ranks(2, "--on-death heal") as kernel:
        failed = kernel.fails("%%distributed -r 1\nimport os\nprint('once')\nos._exit(3)", "RankDied", HANG)
        assert failed.stdout.count("once") == 1
        assert "rank 1 replaced in " in failed.stdout
        assert lines_by_rank(kernel.ok("%%distributed\nprint(rank)").stdout) == {0: ["0"], 1: ["1"]}


def test_a_cell_that_kills_its_rank_at_the_same_step_each_time_is_given_up(tmp_path: Path) -> None:
    with spare_with_ranks(2, "--on-death heal") as kernel:
        kernel.ok(TRAINING.format(deaths=[], folder=str(tmp_path), keeps=""))
        code = "%%distributed\nif rank == 1: os._exit(3)\ntrain()"
        failed = kernel.fails(code, "RankDied", HANG)
        assert failed.evalue.startswith("rank 1 died: exit code 3")
        assert failed.stdout.count("training continues from step 0") == 3


def test_a_cell_that_was_interrupted_is_not_run_again(tmp_path: Path) -> None:
    with spare_with_ranks(2, "--on-death heal") as kernel:
        kernel.ok(TRAINING.format(deaths=[], folder=str(tmp_path), keeps=""))
        cell = kernel.start(
            "%%distributed\ntry:\n    while True:\n        train()\n        print('go')\n"
            "except KeyboardInterrupt:\n    if rank == 1: os._exit(3)"
        )
        cell.wait_for("] go")
        kernel.interrupt()
        outcome = cell.finish(HANG)
        assert "rank 1 replaced in " in outcome.stdout, str(outcome)
        assert outcome.ename == "KeyboardInterrupt" and "run the cell again to continue" in outcome.evalue, str(outcome)
        agree = kernel.ok("%%distributed\nprint(nbdist.check(model))").stdout
        assert "ranks 0-1 agree" in agree, agree


def test_a_rank_that_stays_in_the_cell_for_good_is_replaced_too(tmp_path: Path) -> None:
    with spare_with_ranks(3, "--on-death heal") as kernel:
        kernel.ok(TRAINING.format(deaths=[], folder=str(tmp_path), keeps=""))
        once = f"os.path.exists({str(tmp_path / 'once')!r})"
        code = (
            "import ctypes\n"
            f"if rank == 0 and not {once}:\n    open({str(tmp_path / 'once')!r}, 'x').close()\n    os._exit(3)\n"
            f"if rank == 1 and len(os.listdir({str(tmp_path)!r})) < 2:\n"
            f"    open({str(tmp_path / 'twice')!r}, 'x').close()\n    ctypes.PyDLL(None).sleep(600)\n"
            "train()"
        )
        said = kernel.ok(f"%%distributed\n{code}", HANG).stdout
        assert "rank 1 does not leave the cell, so is replaced, too" in said
        assert "ranks 0-1 replaced in " in said
        assert "training continues from step 0, with the state of rank 2" in said


def test_a_newcomer_that_has_prepared_nothing_is_named() -> None:
    with spare_with_ranks(2, "--on-death heal") as kernel:
        kernel.ok("%%distributed\nimport os, torch, nbdist\nmodel = nbdist.prepare(torch.nn.Linear(2, 2))")
        failed = kernel.fails("%%distributed\nif rank == 1: os._exit(3)", "RankError", HANG)
        assert "rank 1 has prepared nothing, so the training can't continue there" in failed.evalue
        assert failed.stdout.startswith("rank 1 died: exit code 3")


def test_the_session_ends_if_it_is_to() -> None:
    with spare_with_ranks(2, "--on-death stop") as kernel:
        failed = kernel.fails("%%distributed\nimport os\nif rank == 1: os._exit(3)", "RankDied", HANG)
        assert "the session was stopped because of `--on-death stop`" in failed.stdout
        (report,) = re.findall(r"^report, to send with an issue: (.*)$", failed.traceback, re.MULTILINE)
        assert re.search(r"rank 0: [0-9.]+ MiB private", Path(report).read_text(encoding="utf-8"))
        assert "no session is running" in kernel.fails("%%distributed\nprint(1)", "SessionClosed").evalue


def test_without_a_source_the_ranks_that_have_trained_give_their_state(tmp_path: Path) -> None:
    with spare_with_ranks(2) as kernel:
        kernel.ok(TRAINING.format(deaths=[(3, 0, False)], folder=str(tmp_path), keeps=""))
        kernel.fails("%%distributed\ntrain()", "RankDied", HANG)
        kernel.ok("%distributed heal", HANG)
        refused = kernel.fails("%%distributed\nnbdist.sync(model, src=0)", "RankError", HANG).evalue
        assert "rank 0 has just replaced one that died, so its state is new: pass src=1" in refused
        synced = lines_by_rank(kernel.ok("%%distributed\nprint(nbdist.sync(model, optimizer, scheduler).src)").stdout)
        assert synced == {0: ["1"], 1: ["1"]}


def test_an_unknown_policy_is_refused(kernel: Kernel) -> None:
    refused = kernel.fails("import nbdist\nnbdist.Session(2, on_death='pray')", "UsageError").evalue
    assert refused == "on_death 'pray' is unknown. Allowed values: 'ask', 'heal', 'stop'"
