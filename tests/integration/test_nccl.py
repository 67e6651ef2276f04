"""Ranks that are stuck in NCCL and CUDA, by stand-ins: calls that spin, an abort that blocks, a lock held with the GIL.

Nothing here can wait for anything that it must not: rank 0 would hang, with its control thread or as a whole.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from testbed.kernel import Kernel, both
from tests.conftest import shared_kernel
from tests.support.spare import spare_with_ranks

pytestmark = pytest.mark.torch_private

SETUP = """%%distributed
import sys, threading, time, torch, torch.distributed as dist
from tests.stand_ins import nccl
from tests.stand_ins.cuda import Torch
stand_in, own_cuda = Torch("GPU-1"), sys.modules["torch.cuda"]
stand_in.gpus[0].allocate(5)
nccl.install()
"""
ASK = """
import nbdist
from nbdist.wire.questions.knowing import GetMemory, GetMetrics
from nbdist.wire.questions.stopping import GetStack
from tests.support import inside
session = nbdist.get_session()
def ask(question):
    return inside.ask(session, question())
"""
RIGHT = """%%distributed
x = torch.ones(1)
nccl.synchronize(nccl.all_reduce(x))
print(int(x))
"""


@pytest.fixture(scope="module")
def shared() -> Iterator[Kernel]:
    with shared_kernel(2) as kernel:
        kernel.ok(ASK)
        kernel.ok(SETUP)
        yield kernel


@pytest.fixture
def kernel(shared: Kernel) -> Iterator[Kernel]:
    yield shared
    assert shared.ok(RIGHT).lines == both("2")


def test_an_abort_that_blocks_holds_up_neither_ctrl_c_nor_the_group_s_renewal(kernel: Kernel) -> None:
    cell = kernel.start(
        "%%distributed\nif rank == 0:\n    work = nccl.all_reduce(torch.ones(1))\n"
        "    print('go')\n    nccl.synchronize(work)"
    )
    cell.wait_for("go")
    kernel.interrupt()
    outcome = cell.finish(60)
    assert outcome.ename == "KeyboardInterrupt" and "process groups rebuilt" in outcome.traceback, str(outcome)
    blocked = "print(sum(thread.name == 'nbdist-abort' for thread in threading.enumerate()))"
    assert kernel.ok(f"%%distributed\n{blocked}").lines == both("1")
    assert kernel.value("sorted(ask(GetStack))") == [0, 1]


def test_a_rank_that_waits_for_a_kernel_is_freed_when_another_has_failed(kernel: Kernel) -> None:
    outcome = kernel.run(
        "%%distributed\nif rank == 1: raise KeyError('first')\nnccl.synchronize(nccl.all_reduce(torch.ones(1)))",
        limit=60,
    )
    assert outcome.evalue == "rank 1 raised KeyError: 'first'", str(outcome)
    assert "rank 0: interrupted, because rank 1 failed" in outcome.traceback


def test_a_rank_that_is_stuck_in_cuda_s_allocator_answers_and_hears_interrupts(kernel: Kernel) -> None:
    kernel.ok("%%distributed\nsys.modules['torch.cuda'] = stand_in.cuda")
    kernel.ok(
        "%%distributed --background\nif rank == 1:\n    while True: time.sleep(0.01)\n"
        "backend, work = nccl.current(), nccl.all_reduce(torch.ones(1))\n"
        "stand_in.gpus[0].allocate_when_full(lambda: backend.await_kernel(work))"
    )
    kernel.ok("handle = _\nwhile 'spin' not in str(ask(GetStack)[0]): pass")
    for question in ("GetMetrics", "GetMemory", "GetStack"):
        assert kernel.value(f"sorted(ask({question}))") == [0, 1]
    kernel.fails("handle.interrupt(); handle.wait(30)", "KeyboardInterrupt")
    kernel.ok("%%distributed\nsys.modules['torch.cuda'] = own_cuda")


def test_a_rank_that_nccl_s_watchdog_ends_is_named_with_the_signal_and_the_other_goes_on() -> None:
    with spare_with_ranks(2) as kernel:
        kernel.ok(
            "%%distributed\nimport os, torch\nfrom datetime import timedelta\nfrom tests.stand_ins import nccl\n"
            "os.environ['TORCH_NCCL_ASYNC_ERROR_HANDLING'] = '3'\nkept = nccl.install(timedelta(seconds=0.2))"
        )
        late = "%%distributed\nif rank == 0:\n    nccl.synchronize(nccl.all_reduce(torch.ones(1)))"
        outcome = kernel.run(late, limit=60)
        assert outcome.ename == "RankDied" and "rank 0" in outcome.evalue and "SIGABRT" in outcome.evalue, str(outcome)
        assert kernel.ok("%%rank 1\nprint(kept.name())").stdout == "[1] nccl\n"
