"""Code on ranks that waits for the user: `input()`, `getpass()` and debuggers, in the notebook's input field."""

from __future__ import annotations

import os
import signal

import pytest

from testbed.kernel import Kernel
from tests.support.cells import on_ranks

READERS = [
    "input('name? ')",
    "import getpass; getpass.getpass()",
    "breakpoint()",
    "import pdb; pdb.set_trace()",
    "import torch.distributed as dist; dist.breakpoint()",
]


def test_ranks_that_read_a_line_take_turns_and_each_gets_its_own(ranks: Kernel) -> None:
    cell = ranks.start("%%distributed\nname = input('name? ')", input_allowed=True)
    entered = {}
    for answer in ("one", "two"):
        entered[cell.enter(answer)] = answer
    assert cell.finish().status == "ok"
    first, second = entered["[rank 0] name? "], entered["[rank 1] name? "]
    assert on_ranks(ranks, "name") == [f"[0] {first!r}\n[1] {second!r}"]


@pytest.mark.parametrize("code", READERS)
def test_where_nobody_can_enter_anything_the_rank_that_asks_fails_at_once(ranks: Kernel, code: str) -> None:
    outcome = ranks.fails(f"%%distributed\n{code}", "RankError")
    assert "InteractionError: input is not available here" in outcome.evalue


@pytest.mark.parametrize("code", ["input()", "breakpoint()", "import pdb; pdb.set_trace()"])
def test_an_interrupt_leaves_the_prompt_and_the_cell_but_not_the_session(ranks: Kernel, code: str) -> None:
    cell = ranks.start(f"%%distributed -r 1\n{code}\n1", input_allowed=True)
    cell.prompt()
    ranks.interrupt()
    assert cell.finish().ename == "KeyboardInterrupt"
    assert on_ranks(ranks, "rank") == ["[0] 0\n[1] 1"]


def test_a_breakpoint_shows_the_line_and_steps_through_the_cell(ranks: Kernel) -> None:
    cell = ranks.start("%%distributed -r 1\nx = 5\nbreakpoint()\ny = x + 2\nz = y", input_allowed=True)
    for command in ("next", "next", "p f'{y = }'", "continue"):
        assert cell.enter(command) == "[rank 1] ipdb> "
    outcome = cell.finish()
    assert outcome.status == "ok" and "[1] 'y = 7'" in outcome.stdout
    assert "interactiveshell" not in outcome.stdout
    assert on_ranks(ranks, "'__return__' in globals()") == ["[0-1] False"]


@pytest.mark.torch_private
def test_while_the_user_types_collectives_wait_without_a_limit(ranks: Kernel) -> None:
    ranks.ok(
        "%%distributed\nimport time, torch, torch.distributed as dist\nfrom datetime import timedelta\n"
        "backend = dist.group.WORLD._get_backend(torch.device('cpu'))\n"
        "before = backend.options._timeout"
    )
    cell = ranks.start(
        "%%distributed\nlong = timedelta(days=30)\nif rank == 1:\n    input()\n"
        "else:\n    while backend.options._timeout < long: time.sleep(0.01)\n    print('rests')",
        input_allowed=True,
    )
    cell.prompt()
    cell.enter_now("")
    assert cell.finish().lines == {0: ["rests"]}
    assert on_ranks(ranks, "backend.options._timeout == before") == ["[0-1] True"]


def test_the_death_of_a_rank_that_asks_is_shown_without_an_answer(own_ranks: Kernel) -> None:
    pids = own_ranks.rank_pids()
    cell = own_ranks.start("%%distributed -r 1\ninput()", input_allowed=True)
    cell.prompt()
    os.kill(pids[1], signal.SIGKILL)
    assert cell.finish().ename == "RankDied"
    assert own_ranks.ok("1 + 1").plain == ["2"]
