"""Whatever a question to a rank does, its cell can be interrupted meanwhile, and later questions are answered."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from testbed.kernel import LIMIT, Kernel, both

NAMES = """%%distributed
import threading, time
asked, go_on = threading.Event(), threading.Event()
class Slow:
    def __repr__(self):
        asked.set()
        go_on.wait()
        return "slow"
class Surrogate:
    def __repr__(self): return "caf\\udce9"
class Leaves:
    def __repr__(self): raise SystemExit(3)
class Broken(Exception):
    def __str__(self): raise self
class Breaks:
    def __repr__(self): raise Broken
slow, surrogate, leaves, breaks = Slow(), Surrogate(), Leaves(), Breaks()
"""
ASK = """
import msgspec, nbdist
from nbdist.wire.questions.knowing import GetMemory, GetMetrics, Inspect
from nbdist.wire.questions.stopping import GetStack
from tests.support import inside
session = nbdist.get_session()
def ask(question, *, timeout=30):
    answers = inside.ask(session, question, timeout)
    return {rank: msgspec.structs.asdict(answer) for rank, answer in answers.items()}
def inspect(name, **keywords):
    return ask(Inspect(name, 0), **keywords)
def metrics():
    return {rank: msgspec.structs.asdict(answer['sample']) for rank, answer in ask(GetMetrics()).items()}
def memory():
    return ask(GetMemory())
"""
COMPUTE = "import time\nwhile True: time.sleep(0.01)"


@pytest.fixture
def names(ranks: Kernel) -> Kernel:
    """Ranks with names that are hard to look at, and a notebook that can ask them anything."""
    ranks.ok(ASK)
    ranks.ok(NAMES)
    return ranks


@pytest.fixture
def busy(names: Kernel) -> Iterator[Kernel]:
    """Both ranks run a cell that only an interrupt ends. Afterwards they answer as ever."""
    run(names, COMPUTE)
    yield names
    stop(names)
    names.ok("%%distributed\ngo_on.set()")
    assert inspect(names, "asked") != ""


def run(kernel: Kernel, code: str) -> None:
    """Run it on both ranks in the background, from now on."""
    kernel.ok(f"%%distributed --background\n{code}")
    kernel.ok("handle, stopped = _, False\nwhile not all(rank['running'] for rank in ask(GetStack()).values()): pass")


def stop(kernel: Kernel) -> None:
    """Interrupt what runs in the background."""
    kernel.ok("handle.interrupt()\ntry: handle.wait(30)\nexcept KeyboardInterrupt: stopped = True")
    assert kernel.value("stopped")


def inspect(kernel: Kernel, name: str) -> str:
    """What Shift-Tab shows in a distributed cell; empty if it finds nothing."""
    reply: dict[str, Any] = kernel.client.inspect(f"%%distributed\n{name}", reply=True, timeout=LIMIT)["content"]
    return str(reply["data"]["text/plain"]) if reply["found"] else ""


def test_a_repr_that_does_not_end_holds_up_neither_interrupts_nor_stacks(busy: Kernel) -> None:
    busy.ok("inspect('slow', timeout=0.2)")
    assert sorted(busy.value("ask(GetStack())")) == [0, 1]


def test_questions_that_waited_too_long_behind_another_are_not_worked_out(names: Kernel) -> None:
    names.ok("inspect('slow', timeout=0.2)")
    names.ok("import threading; late = []\nthread = threading.Thread(target=lambda: late.append(inspect('asked')))")
    names.ok("thread.start(); inspect('asked', timeout=1.5)")
    names.ok("%%distributed\ngo_on.set()")
    names.ok("thread.join()")
    assert all("busy with another question" in answer["why"] for answer in names.value("late[0]").values())


@pytest.mark.parametrize("name", ["surrogate", "leaves", "breaks"])
def test_a_repr_that_can_t_be_sent_or_raises_is_an_answer_too(busy: Kernel, name: str) -> None:
    assert sorted(busy.value(f"inspect({name!r})")) == [0, 1]


PRETEND_CUDA = """%%distributed
import sys, threading, time
from tests.stand_ins.cuda import Torch
askers, stand_in, own_cuda = [], Torch("GPU-1"), sys.modules['torch.cuda']
stand_in.gpus[0].allocate(5)
stand_in.on_look = lambda: askers.append(threading.current_thread().name)
sys.modules['torch.cuda'] = stand_in.cuda
"""


@pytest.fixture
def pretending(names: Kernel) -> Iterator[Kernel]:
    """Ranks whose torch takes itself for one that uses a GPU."""
    names.ok(PRETEND_CUDA)
    yield names
    names.ok("%%distributed\nsys.modules['torch.cuda'] = own_cuda")


def test_while_a_cell_runs_only_the_main_thread_asks_cuda_s_allocator(pretending: Kernel) -> None:
    run(pretending, COMPUTE)
    for question in ("metrics", "memory"):  # until the main thread has been asked
        pretending.ok(f"while not all(rank['reserved'] == 5 for rank in {question}().values()): pass")
    stop(pretending)
    assert pretending.ok("%%distributed\nprint(*set(askers))").lines == both("MainThread")
