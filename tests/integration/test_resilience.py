"""Models, optimizers and loops live through interrupts: a seeded sample; `scripts/bench interrupts` does the whole."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from testbed.kernel import Kernel, wait_until
from testbed.resilience import PHASES, WRAPPERS
from tests.conftest import shared_kernel
from tests.support.spare import spare_with_ranks

SEED = int(os.environ.get("NBDIST_TEST_SEED", "2026"))
INTERRUPTS = 2  # in each phase
STEPS = 30  # of a run that is exact

TRAIN = """
import pathlib, tempfile
import nbdist
from testbed.resilience import Training
folder = tempfile.TemporaryDirectory()
training = Training(nbdist.get_session(), {wrapper!r}, {seed}, pathlib.Path(folder.name))
"""


@pytest.fixture(scope="module")
def kernels() -> Iterator[dict[int, Kernel]]:
    """Kernels with two and with four ranks."""
    with shared_kernel(2) as two, shared_kernel(4) as four:
        yield {2: two, 4: four}


def train(kernel: Kernel, wrapper: str, seed: int) -> None:
    kernel.ok(TRAIN.format(wrapper=wrapper, seed=seed))


@pytest.mark.torch_private
@pytest.mark.parametrize(("wrapper", "count"), [(wrapper, counts[0]) for wrapper, counts in WRAPPERS.items()])
def test_a_training_goes_on_after_interrupts_at_random_moments(
    wrapper: str, count: int, kernels: dict[int, Kernel]
) -> None:
    """In each phase: forward, backward, all-reduce, optimizer step, data loading, checkpoint, evaluation."""
    train(kernels[count], wrapper, SEED)
    for phase in PHASES:
        kernels[count].ok(f"result = training.interrupt({phase!r}, {INTERRUPTS})")
        wrong = kernels[count].value("result.wrong")
        assert not wrong, f"seed {SEED}, {phase}: {wrong[0]}"


@pytest.mark.torch_private
def test_with_exact_an_interrupted_run_equals_one_never_interrupted() -> None:
    with spare_with_ranks(4, "--exact") as kernel:
        train(kernel, "DDP static_graph", SEED)
        expected, _ = kernel.value(f"training.weights_after({STEPS})")
        total = 0
        for phase in PHASES:
            found, interrupts = kernel.value(f"training.weights_after({STEPS}, {phase!r})")
            assert found == expected, f"seed {SEED}: interrupted {interrupts} times in {phase}"
            total += interrupts
        assert total


MODEL = """%%distributed
import time, torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
module = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
model = DistributedDataParallel(module)
optimizer = torch.optim.AdamW(model.parameters())
x = torch.randn(8, 4)
steps = 0
"""

UNEVEN = """
while True:
    optimizer.zero_grad()
    model(x).square().mean().backward()
    if rank == 1 and steps == 3:
        print('behind')
        time.sleep(0.1)
    optimizer.step()
    steps += 1
"""


@pytest.mark.torch_private
def test_no_rank_is_left_a_step_behind_when_all_are_interrupted_at_once(kernels: dict[int, Kernel]) -> None:
    kernel = kernels[2]
    kernel.ok(MODEL)
    kernel.ok(f"import nbdist\nhandle = nbdist.get_session().run_in_background({UNEVEN!r}, show=False)")
    wait_until(lambda: kernel.value("handle.output[1].stdout") != "", "rank 1 to fall behind")
    kernel.ok("handle.interrupt(now=True)")
    assert kernel.run("handle.wait(20)").ename == "KeyboardInterrupt"
    seen = kernel.ok("%%distributed\nprint(steps, int(next(iter(optimizer.state.values()))['step']))")
    assert len({line for lines in seen.lines.values() for line in lines}) == 1, seen.stdout
    kernel.ok("%%distributed\nimport nbdist\nassert nbdist.check(list(model.parameters()), optimizer)")


SLOW_TO_SCHEDULE = """
while True:
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()
    if rank == 1 and scheduler.last_epoch == 3:
        print('behind')
        time.sleep(60)
    scheduler.step()
"""


@pytest.mark.torch_private
def test_ranks_interrupted_before_and_after_the_scheduler_are_said_to_differ(kernels: dict[int, Kernel]) -> None:
    kernel = kernels[2]
    kernel.ok(MODEL + "scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)\n")
    kernel.ok(f"import nbdist\nhandle = nbdist.get_session().run_in_background({SLOW_TO_SCHEDULE!r}, show=False)")
    wait_until(lambda: kernel.value("handle.output[1].stdout") != "", "rank 1 to fall behind")
    kernel.ok("handle.interrupt(now=True)")
    failed = kernel.fails("handle.wait(20)", "KeyboardInterrupt")
    assert "the learning rate of the next step is set on rank 0, not on rank 1" in failed.traceback
    assert "`nbdist.sync(optimizer, scheduler, src=0)`" in failed.traceback
    kernel.ok("%%distributed\nimport nbdist\nnbdist.sync(optimizer, scheduler, src=0)\n")
    seen = kernel.ok("%%distributed\nprint(scheduler.last_epoch, optimizer.param_groups[0]['lr'])")
    assert len({line for lines in seen.lines.values() for line in lines}) == 1, seen.stdout


@pytest.mark.torch_private
def test_ranks_of_which_some_had_not_ended_their_first_forward_after_an_evaluation_meet_again(
    kernels: dict[int, Kernel],
) -> None:
    """DDP shares buffers at the beginning of a forward, unless the last one was without gradients."""
    kernel = kernels[2]
    kernel.ok(MODEL)
    outcome = kernel.run(
        "%%distributed\n"
        "with torch.no_grad(): model(x)\n"
        "def fail(*_): raise KeyError\n"
        "if rank == 0: module[1].register_forward_hook(fail)\n"
        "model(x)\n"
        "1/0\n"
    )
    assert outcome.ename == "RankError"
    kernel.ok(
        "%%distributed\nmodule[1]._forward_hooks.clear()\nfor _ in range(2): model(x).square().mean().backward()\n"
    )


@pytest.mark.torch_private
def test_ranks_of_which_some_had_not_begun_their_first_forward_after_an_evaluation_meet_again(
    kernels: dict[int, Kernel],
) -> None:
    kernel = kernels[2]
    kernel.ok(MODEL)
    cell = kernel.start(
        "%%distributed\n"
        "with torch.no_grad(): model(x)\n"
        "if rank == 0: model(x)\n"
        "print('there')\n"
        "while True: time.sleep(0.01)\n"
    )
    cell.wait_until(lambda seen: len(seen.lines) == 2, "a word of both ranks")
    kernel.interrupt()
    assert cell.finish().ename == "KeyboardInterrupt"
    kernel.ok("%%distributed\nfor _ in range(2): model(x).square().mean().backward()")
