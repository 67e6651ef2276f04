"""`%distributed stacks`: where the ranks are, at any time."""

from __future__ import annotations

import re

import pytest

from testbed.kernel import Kernel, wait_until
from tests.support.cells import end_background

STUCK = """import torch, torch.distributed as dist, time

def train():
    dist.all_reduce(torch.ones(1))

if rank == 0:
    time.sleep(1000)
train()
"""


@pytest.fixture
def stuck(ranks: Kernel) -> Kernel:
    """Rank 0 sleeps in a background cell, rank 1 waits for it in a function."""
    ranks.ok("handle = __import__('nbdist').get_session().run_in_background(" + repr(STUCK) + ", show=False)")
    wait_until(lambda: "in all_reduce" in shown(ranks) and "time.sleep" in shown(ranks), "rank 1 in all_reduce")
    return ranks


def shown(kernel: Kernel, options: str = "") -> str:
    return kernel.ok(f"%distributed stacks {options}").stdout


def test_ranks_that_run_nothing_are_idle(ranks: Kernel) -> None:
    assert shown(ranks) == "ranks 0-1, idle\n"
    assert ranks.value("__import__('nbdist').get_session().stacks()") == {0: "idle", 1: "idle"}


@pytest.mark.torch_private
def test_each_rank_s_stack_is_shown_from_the_cell_inwards(stuck: Kernel) -> None:
    rank_0, rank_1 = re.split(r"(?m)^(?=rank 1)", shown(stuck))
    assert re.fullmatch(r"rank 0, cell \d+ \(\d+ s\)\n    cell \d+ line 7: time.sleep\(1000\)\n", rank_0)
    assert re.fullmatch(
        r"rank 1, cell \d+ \(\d+ s\), in all_reduce( for \d+ s)?\n"
        r"    cell \d+ line 8: train\(\)\n"
        r"    cell \d+ line 4, in train: dist.all_reduce\(torch.ones\(1\)\)\n"
        r"    distributed_c10d.py:\d+, in all_reduce: .*\n",
        rank_1,
    )
    end_background(stuck)


def test_only_those_asked_for_are_shown(stuck: Kernel) -> None:
    assert "rank 1" not in shown(stuck, "-r 0")
    assert stuck.value("list(__import__('nbdist').get_session().stacks([0]))") == [0]
    end_background(stuck)


def test_ranks_in_the_same_place_are_shown_once(ranks: Kernel) -> None:
    ranks.ok(
        "handle = __import__('nbdist').get_session().run_in_background('import time\\ntime.sleep(1000)', show=False)"
    )
    wait_until(lambda: "time.sleep" in shown(ranks), "ranks to sleep")
    wait_until(lambda: re.fullmatch(r"ranks 0-1, cell .*\n    cell .*: time.sleep\(1000\)\n", shown(ranks)), "both")
    end_background(ranks)


def test_a_rank_whose_call_keeps_python_from_answering_is_said_to_be_in_one(ranks: Kernel) -> None:
    ranks.ok(
        "handle = __import__('nbdist').get_session().run_in_background(\n"
        "    'import ctypes\\nprint(1)\\nif rank == 1: ctypes.PyDLL(None).usleep(3_000_000)')"
    )
    wait_until(lambda: ranks.value("handle.output[1].stdout") != "", "rank 1 in its call")
    assert "blocks Python; `--native` shows it" in shown(ranks, "-r 1")
    ranks.ok("handle.wait(20)")


def test_a_function_that_was_called_is_shown_with_its_cell(ranks: Kernel) -> None:
    """It has come without a cell of its own on the ranks."""
    ranks.ok("import nbdist, threading\ndef slow():\n    import time\n    time.sleep(2)\n")
    ranks.ok("thread = threading.Thread(target=nbdist.get_session().call, args=(slow,))\nthread.start()")
    wait_until(lambda: re.search(r"cell \d+ line 4, in slow: time.sleep\(2\)", shown(ranks)), "ranks in slow")
    ranks.ok("thread.join()")
