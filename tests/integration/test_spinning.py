"""A rank that waits by spinning, as CUDA does, is seen to wait; one that computes is let be.

The wait is a call into C that uses a processor, without the GIL, until a collective that was started before ends.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from testbed.kernel import Kernel
from tests.conftest import shared_kernel

pytestmark = pytest.mark.torch_private

SETUP = """%%distributed
import os, time, torch, torch.distributed as dist
from tests.stand_ins.spinning import noted_late, spin, spinning_until

def start():
    return spinning_until(dist.all_reduce(torch.ones(1), async_op=True).wait)

def opened(path):
    while not os.path.exists(path): time.sleep(0.01)
"""

SPIN = "spin(wait)"


@pytest.fixture(scope="module")
def shared() -> Iterator[Kernel]:
    with shared_kernel(2) as kernel:
        kernel.ok(SETUP)
        yield kernel


@pytest.fixture
def kernel(shared: Kernel) -> Iterator[Kernel]:
    yield shared
    shared.ok("%%distributed\nx = torch.ones(1)\ndist.all_reduce(x)\nassert x.item() == 2")


@pytest.mark.parametrize("line", [SPIN, f"{SPIN}  # loss.item()"])
def test_it_is_freed_when_another_has_failed(line: str, kernel: Kernel) -> None:
    outcome = kernel.run(f"%%distributed\nif rank == 1: raise KeyError('first')\nwait = start()\n{line}", limit=20)
    assert outcome.evalue == "rank 1 raised KeyError: 'first'", str(outcome)
    assert "rank 0: interrupted, because rank 1 failed" in outcome.traceback
    assert "process groups rebuilt" in outcome.traceback


def test_one_interrupt_frees_it_when_another_never_comes(kernel: Kernel) -> None:
    cell = kernel.start(f"%%distributed\nif rank == 0:\n    wait = start()\n    print('go')\n    {SPIN}")
    cell.wait_for("go")
    kernel.interrupt()
    outcome = cell.finish(20)
    assert outcome.ename == "KeyboardInterrupt", str(outcome)
    assert "process groups rebuilt" in outcome.traceback


def test_so_it_does_right_after_a_collective_whose_end_torch_notes_late(kernel: Kernel) -> None:
    cell = kernel.start(
        "%%distributed\ndist.all_reduce(torch.ones(1))\nif rank == 0:\n    wait = start()\n"
        f"    with noted_late(0.5):\n        print('go')\n        {SPIN}\nelse:\n    time.sleep(1000)"
    )
    cell.wait_for("go")
    kernel.interrupt()
    outcome = cell.finish(20)
    assert outcome.ename == "KeyboardInterrupt", str(outcome)
    assert "process groups rebuilt" in outcome.traceback


def test_a_rank_that_computes_while_another_has_failed_is_not_stopped(kernel: Kernel, tmp_path: Path) -> None:
    gate = tmp_path / "open"
    cell = kernel.start(
        f"%%distributed --grace 0.2\nif rank == 1: raise KeyError('first')\n"
        f"wait = spinning_until(lambda: opened({str(gate)!r}))\n{SPIN}\nprint('done')"
    )
    cell.wait_for("rank 0 still run")  # a second after the grace
    gate.touch()
    outcome = cell.finish()
    assert outcome.stdout == "[0] done\n" and "rank 0: finished" in outcome.traceback
