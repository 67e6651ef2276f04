"""With a version of PyTorch or IPython that lacks a private name, a session trains, is interrupted and saves.

Only the feature that needs the name is missing, and is named. All names in turn: tests/stress/missing_names.py.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from testbed.kernel import Kernel, kernel_with_ranks
from tests.support.private_names import UNFREED, UNMEASURED, UNNOTICED, UNRENEWED, without

TRAIN = """%%distributed
import time, torch, nbdist
torch.manual_seed(0)
data = torch.utils.data.TensorDataset(torch.randn(64, 8), torch.randn(64, 4))
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.BatchNorm1d(16), torch.nn.ReLU(), torch.nn.Linear(16, 4))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
model, optimizer, loader = nbdist.prepare(model, optimizer, torch.utils.data.DataLoader(data, batch_size=4))
for x, y in loader:
    optimizer.zero_grad()
    loss = torch.nn.functional.mse_loss(model(x), y)
    nbdist.backward(loss)
    nbdist.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
print("loss", round(nbdist.reduce(loss.detach(), "mean").item(), 4))"""
LOOP = "%%distributed\nprint('go', flush=True)\nwhile True: time.sleep(0.01)"
BARRIER = "%%distributed\nprint('go', flush=True)\nif rank == 0: torch.distributed.barrier()\nelse: time.sleep(1000)"
INTERRUPTED = "KeyboardInterrupt: ranks 0-1 interrupted"
TROUBLE = re.compile("AttributeError|ImportError|ModuleNotFoundError|has no attribute|No module named")


def trains(kernel: Kernel) -> str:
    """Train, and return what is shown below the cell."""
    outcome = kernel.ok(TRAIN)
    assert len(set(re.findall(r"loss [\d.]+", outcome.stdout))) == 1, str(outcome)
    return outcome.stdout + outcome.stderr


def interrupted(kernel: Kernel, code: str) -> str:
    """Interrupt a cell, and return the error's name and text."""
    cell = kernel.start(code)
    cell.wait_for_ranks(2, "go")
    kernel.interrupt()
    outcome = cell.finish()
    return f"{outcome.ename}: {outcome.evalue}"


def lives(kernel: Kernel, folder: Path, strategy: str = "ddp") -> str:
    """Train, save, load and interrupt a session, and return what is shown below its cells."""
    kernel.ok(f"%distributed plan {strategy}")
    shown = kernel.ok("%distributed tflops on").stdout + trains(kernel)
    kernel.ok(f"%%distributed\nnbdist.save_state('{folder}/{strategy}')")
    assert kernel.ok(f"%%distributed\nnbdist.load_state('{folder}/{strategy}').steps").plain == ["[0-1] 8"]
    assert interrupted(kernel, LOOP).startswith(INTERRUPTED)
    return shown + trains(kernel) + kernel.ok("%distributed why").stdout


def losses(shown: str) -> set[str]:
    return set(re.findall(r"loss [\d.]+", shown))


@pytest.fixture(scope="module")
def expected(ranks: Kernel, tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """The loss after all steps, where nothing is missing."""
    return losses(lives(ranks, tmp_path_factory.mktemp("whole")))


@pytest.mark.torch_private
def test_names_that_a_plain_session_can_do_without_may_be_missing_all_at_once(
    tmp_path: Path, expected: set[str]
) -> None:
    with kernel_with_ranks(2, **without(UNNOTICED)) as kernel:
        for strategy in ("ddp", "fsdp"):
            shown = lives(kernel, tmp_path, strategy)
            assert losses(shown) == expected and "FLOPS a rank" in shown and not TROUBLE.search(shown), shown
        assert interrupted(kernel, BARRIER).startswith(INTERRUPTED)
        assert losses(trains(kernel)) == expected


@pytest.mark.parametrize("name", ["torch._C:_get_dispatch_stack_at", "torch.utils._contextlib"])
def test_without_what_sees_steps_they_are_not_measured_and_that_is_said_once(
    name: str, tmp_path: Path, expected: set[str]
) -> None:
    assert name in UNMEASURED
    with kernel_with_ranks(2, **without([name])) as kernel:
        shown = lives(kernel, tmp_path)
        assert losses(shown) == expected
        reasons = [line for line in shown.splitlines() if "steps can't be measured" in line]
        assert len(reasons) == 2 and len(set(reasons)) == 1, shown  # once unasked, once by `why`
        assert name.rsplit(":", maxsplit=1)[-1] in reasons[0]


@pytest.mark.parametrize("name", ["torch.distributed:ProcessGroup._get_backend"])
def test_without_what_renews_groups_an_interrupted_collective_asks_for_a_restart(
    name: str, tmp_path: Path, expected: set[str]
) -> None:
    assert name in UNRENEWED
    with kernel_with_ranks(2, **without([name])) as kernel:
        assert losses(lives(kernel, tmp_path)) == expected
        assert interrupted(kernel, BARRIER).startswith(INTERRUPTED)
        failed = kernel.run(TRAIN)
        assert "StaleGroupError" in failed.evalue and "use `%distributed restart`" in failed.evalue, str(failed)
        kernel.ok("%distributed restart")
        assert losses(trains(kernel)) == expected


@pytest.mark.parametrize("name", ["torch.distributed.distributed_c10d:_new_process_group_helper"])
def test_without_what_ends_collectives_an_interrupt_names_the_rank_that_waits_in_one(
    name: str, tmp_path: Path, expected: set[str]
) -> None:
    assert name in UNFREED
    with kernel_with_ranks(2, **without([name])) as kernel:
        assert losses(lives(kernel, tmp_path)) == expected
        cell = kernel.start(BARRIER)
        cell.wait_for_ranks(2, "go")
        kernel.interrupt()
        cell.wait_for("Interrupt again")
        kernel.interrupt()
        ended = cell.finish().traceback
        assert "rank 0: still running" in ended and "`%distributed restart` starts fresh ranks" in ended, ended
        kernel.ok("%distributed restart")
        assert losses(trains(kernel)) == expected
