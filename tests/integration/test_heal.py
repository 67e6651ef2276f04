"""Ranks that have died are replaced: the others keep their variables, groups, models and handles."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from testbed.kernel import Kernel
from tests.support.cells import printed
from tests.support.spare import spare_with_ranks

pytestmark = pytest.mark.torch_private

HANG = 60.0
ALL_SUMS = {0: ["111"], 1: ["111"], 2: ["111"]}
SUM = "%%distributed\nx = torch.full((1,), 10.0 ** rank)\ndist.all_reduce(x)\nprint(int(x))"
MODEL = """
import os, signal, torch, torch.distributed as dist, nbdist
from torch import nn
from torch.distributed.tensor import DTensor
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
model, optimizer = nbdist.prepare(net, torch.optim.AdamW(net.parameters(), lr=1e-2))
def train(first, last):
    for step in range(first, last):
        data = torch.randn(6, 8, generator=torch.Generator().manual_seed(100 * step + rank))
        model(data).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
"""
WEIGHTS = "%%distributed\nprint(*[float(whole(p).double().abs().sum()).hex() for p in model.parameters()])"
IMPORTS = "%%distributed\nimport os, signal, time\nimport torch, torch.distributed as dist"


@pytest.fixture
def three() -> Iterator[Kernel]:
    """Three new ranks in a kernel that only this test uses."""
    with spare_with_ranks(3) as kernel:
        kernel.ok(IMPORTS)
        yield kernel


def kill(kernel: Kernel, rank: int) -> None:
    """End a rank in a collective that the others wait in."""
    code = f"if rank == {rank}:\n    os.kill(os.getpid(), signal.SIGKILL)\ndist.barrier()"
    kernel.fails(f"%%distributed\n{code}", "RankDied", HANG)


@pytest.mark.parametrize("rank", [0, 1])
def test_all_groups_are_whole_again_and_the_others_keep_their_variables(three: Kernel, rank: int) -> None:
    three.ok("%%distributed\nkept = rank + 10\npairs = [dist.new_group(pair) for pair in ([0, 1], [1, 2], [0, 2])]")
    kill(three, rank)
    three.ok("%distributed heal", HANG)
    assert printed(three, SUM) == ALL_SUMS
    others = [other for other in range(3) if other != rank]
    who = ",".join(map(str, others))
    assert printed(three, f"%%distributed -r {who}\nprint(kept)") == {other: [str(other + 10)] for other in others}
    pair = f"%%distributed -r {who}\ny = torch.ones(1)\ndist.all_reduce(y, group=pairs[{rank + 1}])\nprint(int(y))"
    assert printed(three, pair) == {other: ["2"] for other in others}


def test_a_newcomer_finds_the_groups_that_it_has_no_handles_of(three: Kernel) -> None:
    three.ok("%%distributed\npair = dist.new_group([0, 1], group_desc='pair')\nalone = dist.new_group([2])")
    kill(three, 1)
    three.ok("%distributed heal", HANG)
    three.ok("%%distributed -r 1\nimport nbdist\npair = nbdist.group([0, 1])\nassert pair is nbdist.group('pair')")
    code = "%%distributed -r 0-1\ny = torch.ones(1)\ndist.all_reduce(y, group=pair)\nprint(int(y))"
    assert printed(three, code) == {0: ["2"], 1: ["2"]}
    missing = three.fails("%%distributed -r 1\nnbdist.group([1, 2])", "RankError").traceback
    assert "this rank is in no process group [1, 2]. It is in 0-2 (default_pg); 0-1 (pair)" in missing


def test_groups_are_made_again_afterwards(three: Kernel) -> None:
    kill(three, 2)
    three.ok("%distributed heal", HANG)
    code = "late = dist.new_group([0, 2])\nsaid = [None] * 3\ndist.all_gather_object(said, rank)\nprint(said)"
    assert printed(three, f"%%distributed\n{code}") == {rank: ["[0, 1, 2]"] for rank in range(3)}
    code = "%%distributed -r 0,2\ny = torch.ones(1)\ndist.all_reduce(y, group=late)\nprint(int(y))"
    assert printed(three, code) == {0: ["2"], 2: ["2"]}


def test_a_newcomer_runs_imports_and_definitions(three: Kernel) -> None:
    three.ok("%%distributed\nimport math\ndef area(r):\n    return math.pi * r\ncount = 3")
    kill(three, 1)
    said = three.ok("%distributed heal", HANG).stdout
    assert "it ran the imports and definitions of cells" in said
    assert "other variables are missing on rank 1; those of the other ranks are kept" in said
    assert printed(three, "%%distributed -r 1\nprint(round(area(1), 2), 'count' in globals())") == {1: ["3.14 False"]}


def test_marked_cells_run_whole_and_nothing_else_does(three: Kernel) -> None:
    three.ok("%%distributed --setup\nimport math\ncount = 3")
    three.ok("%%distributed\ndef area(r):\n    return r")
    assert "setup cells, which new ranks run first: " in three.ok("%distributed status").stdout
    kill(three, 1)
    said = three.ok("%distributed heal", HANG).stdout
    assert "it ran the setup cell" in said
    assert printed(three, "%%distributed -r 1\nprint(count, 'area' in globals())") == {1: ["3 False"]}


def test_a_setup_cell_gets_the_groups_that_it_made_before(three: Kernel) -> None:
    groups = "pairs = [dist.new_group(pair) for pair in ([0, 2], [1, 2])]"
    three.ok(f"%%distributed --setup\nimport torch, torch.distributed as dist\n{groups}")
    kill(three, 1)
    three.ok("%distributed heal", HANG)
    code = "%%distributed -r 1-2\ny = torch.ones(1)\ndist.all_reduce(y, group=pairs[1])\nprint(int(y))"
    assert printed(three, code) == {1: ["2"], 2: ["2"]}


def test_a_setup_cell_that_fails_is_shown_and_the_rank_is_there(three: Kernel, tmp_path: Path) -> None:
    three.ok("%%distributed --setup\nimport torch, torch.distributed as dist")
    three.ok(f"%%distributed --setup\nopen(f'{tmp_path}/{{rank}}', 'x').close()")
    kill(three, 1)
    failed = three.fails("%distributed heal", "RankError", HANG)
    assert failed.evalue.startswith("rank 1 was replaced; then setup cell ") and "FileExistsError" in failed.traceback
    assert printed(three, SUM) == ALL_SUMS


def test_a_rank_that_dies_in_its_setup_leaves_the_others_as_they_were(three: Kernel, tmp_path: Path) -> None:
    three.ok("%%distributed --setup\nimport os, torch, torch.distributed as dist")
    three.ok(f"%%distributed --setup\nif os.path.exists('{tmp_path}/end'): os._exit(3)")
    kill(three, 1)
    (tmp_path / "end").touch()
    failed = three.fails("%distributed heal", "SessionBroken", HANG)
    assert "rank 1 was not replaced: rank 1 ended while it took its place: exit code 3" in failed.evalue
    (tmp_path / "end").unlink()
    three.ok("%distributed heal", HANG)
    assert printed(three, SUM) == ALL_SUMS


def test_ctrl_c_in_a_setup_cell_leaves_the_others_as_they_were(three: Kernel, tmp_path: Path) -> None:
    three.ok("%%distributed --setup\nimport os, time, torch, torch.distributed as dist")
    three.ok(f"%%distributed --setup\nif os.path.exists('{tmp_path}/wait'): print('waits', flush=True); time.sleep(60)")
    kill(three, 1)
    (tmp_path / "wait").touch()
    running = three.start("%distributed heal")
    running.wait_for("waits")
    three.interrupt()
    assert running.finish(HANG).ename == "KeyboardInterrupt"
    (tmp_path / "wait").unlink()
    three.ok("%distributed heal", HANG)
    assert printed(three, SUM) == ALL_SUMS


def test_a_cell_that_waits_for_the_end_of_a_heal_can_be_interrupted(three: Kernel, tmp_path: Path) -> None:
    there, go = tmp_path / "there", tmp_path / "go"
    three.ok("%%distributed --setup\nimport os, time, torch, torch.distributed as dist")
    wait = f"open('{there}', 'x').close()\nwhile not os.path.exists('{go}'): time.sleep(0.01)"
    three.ok(
        f"%%distributed --setup\nif os.path.exists('{tmp_path}/heals'):\n    {wait.replace(chr(10), chr(10) + '    ')}"
    )
    kill(three, 1)
    (tmp_path / "heals").touch()
    other = f"""
import os, threading, time, nbdist
session, endings = nbdist.get_session(), []
def meanwhile():
    while not os.path.exists('{there}'): time.sleep(0.01)
    held = session.run_in_background('pass', 0)
    held.interrupt()
    try: held.wait(30)
    except BaseException as error: endings.append(type(error).__name__)
    open('{go}', 'x').close()
thread = threading.Thread(target=meanwhile)
thread.start()
session.heal()
thread.join()
"""
    three.ok(other, HANG)
    assert three.value("endings") == ["KeyboardInterrupt"]
    assert printed(three, SUM) == ALL_SUMS


def test_a_rank_that_is_stuck_in_c_is_replaced(three: Kernel) -> None:
    three.ok("%%distributed\nkept = rank")
    stuck = "if rank == 1:\n    print('in C', flush=True)\n    ctypes.PyDLL(None).sleep(600)"
    running = three.start(f"%%distributed\nimport ctypes\n{stuck}")
    running.wait_for("in C")
    three.interrupt()
    running.wait_for("Interrupt again to stop them now")
    three.interrupt()
    running.finish(HANG)
    refused = three.fails("%distributed heal -r 1", "UsageError").evalue
    assert "rank 1 has not died: `%distributed heal -r 1 --kill` ends it first" in refused
    three.ok("%distributed heal -r 1 --kill", HANG)
    assert printed(three, SUM) == ALL_SUMS
    assert printed(three, "%%distributed -r 0,2\nprint(kept)") == {0: ["0"], 2: ["2"]}


@pytest.mark.parametrize(("plan", "ranks"), [("ddp", 2), ("fsdp", 2), ("hsdp", 4)])
def test_training_goes_on_from_a_checkpoint_as_if_nobody_had_died(tmp_path: Path, plan: str, ranks: int) -> None:
    """A newcomer prepares model and optimizer by itself, while the others keep theirs."""
    checkpoint = f"nbdist.{{}}_state({str(tmp_path / 'state')!r})"
    with spare_with_ranks(ranks) as kernel:
        kernel.ok(f"%distributed plan {plan}")
        kernel.ok(f"%%distributed --setup\n{MODEL}")
        kernel.ok(f"%%distributed\ntrain(0, 3)\n{checkpoint.format('save')}\ntrain(3, 6)")
        expected = printed(kernel, WEIGHTS)
        kill(kernel, 1)
        kernel.ok("%distributed heal", HANG)
        kernel.ok(f"%%distributed\n{checkpoint.format('load')}\ntrain(3, 6)", HANG)
        assert printed(kernel, WEIGHTS) == expected


@pytest.mark.parametrize(("plan", "ranks", "src"), [("ddp", 2, 0), ("hsdp --replicas 2", 4, 2)])
def test_replicas_are_equal_to_the_bit_after_a_sync(plan: str, ranks: int, src: int) -> None:
    with spare_with_ranks(ranks) as kernel:
        kernel.ok(f"%distributed plan {plan}")
        kernel.ok(f"%%distributed --setup\n{MODEL}")
        kernel.ok("%%distributed\ntrain(0, 3)")
        kill(kernel, 1)
        kernel.ok("%distributed heal", HANG)
        kernel.ok(f"%%distributed\nnbdist.sync(model, optimizer, src={src})\ntrain(3, 6)", HANG)
        healed = printed(kernel, WEIGHTS)
        kernel.ok("%distributed restart")
        kernel.ok(f"%%distributed\n{MODEL}\ntrain(0, 6)", HANG)
        assert printed(kernel, WEIGHTS) == healed


LATE = """
import time
from nbdist.worker.recovery import reset_models
settled = reset_models.buckets_settled
def late():
    time.sleep(0.5 if {rank} == int(rank) else 0.0)  # the newcomer's vote comes after the other's
    return settled()
reset_models.buckets_settled = late
"""


def test_a_second_heal_does_not_take_the_votes_of_the_first() -> None:
    with spare_with_ranks(2) as kernel:
        kernel.ok("%distributed plan ddp")
        kernel.ok(f"%%distributed --setup\n{MODEL}{LATE.format(rank=0)}")
        for rank in (1, 0):
            kernel.ok("%%distributed\ntrain(0, 3)")
            kill(kernel, rank)
            kernel.ok("%distributed heal", HANG)
            kernel.ok("%%distributed\nnbdist.sync()\ntrain(3, 6)\nassert nbdist.check(model)", HANG)


def test_shards_that_nobody_else_has_need_a_checkpoint() -> None:
    with spare_with_ranks(2) as kernel:
        kernel.ok("%distributed plan fsdp")
        kernel.ok(f"%%distributed --setup\n{MODEL}")
        kernel.ok("%%distributed\ntrain(0, 3)")
        kill(kernel, 1)
        kernel.ok("%distributed heal", HANG)
        refused = kernel.fails("%%distributed\nnbdist.sync(model, optimizer, src=0)", "RankError", HANG).evalue
        assert "rank 0 has done 3 steps, rank 1 has done 0 steps: load a checkpoint on all ranks" in refused


def test_so_do_shards_of_an_optimizer_that_counts_no_steps() -> None:
    with spare_with_ranks(2) as kernel:
        kernel.ok("%distributed plan fsdp")
        kernel.ok(f"%%distributed --setup\n{MODEL.replace('AdamW', 'SGD')}")
        kernel.ok("%%distributed\ntrain(0, 3)")
        kill(kernel, 1)
        kernel.ok("%distributed heal", HANG)
        refused = kernel.fails("%%distributed\nnbdist.sync()", "RankError", HANG).evalue
        assert "rank 1 has just replaced others: load a checkpoint on all ranks" in refused
        kernel.ok("%%distributed\ntrain(3, 4)\nnbdist.sync()", HANG)  # whoever trains on has accepted it


def test_with_nobody_dead_it_says_so_and_is_no_error(three: Kernel) -> None:
    assert three.ok("%distributed heal").stdout.startswith("no rank has died, so none was replaced. ")
    assert three.value("__import__('nbdist').get_session().heal().ranks") == []


def test_it_is_refused_when_it_can_t_help(three: Kernel) -> None:
    named = "--kill ends living ranks, so say which: `%distributed heal -r 1 --kill`"
    assert three.fails("%distributed heal --kill", "UsageError").evalue == named
    assert "no other rank would be left" in three.fails("%distributed heal -r 0-2 --kill", "UsageError").evalue
    kill(three, 1)
    three.ok("task = None\n%distributed status")
    three.ok("%%distributed -r 0 --background --capture slow\ntime.sleep(60)")
    busy = three.fails("%distributed heal", "SessionBusy").evalue
    assert busy.startswith("rank 0 is still running")
    three.ok("%distributed interrupt -r 0")
