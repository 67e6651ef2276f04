"""Programs written for torchrun run on ranks as they are: they make their group, parse their arguments, spawn, draw."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from testbed.kernel import Kernel, both
from testbed.ports import free_port
from tests.conftest import shared_kernel
from tests.support.screen import screen

PROGRAMS = Path(__file__).resolve().parents[1] / "programs"

# What the official tutorial on DistributedDataParallel begins and ends with.
TUTORIAL = """
import os, torch, torch.distributed as dist
def setup(rank, world_size):
    os.environ["MASTER_ADDR"] = "localhost"
    os.environ["MASTER_PORT"] = str({port})
    dist.init_process_group("gloo", rank=rank, world_size=world_size)
def train(rank, world_size):
    setup(rank, world_size)
    total = torch.ones(1)
    dist.all_reduce(total)
    dist.destroy_process_group()
    return total.item()
"""


@pytest.fixture(scope="module")
def own_group() -> Iterator[Kernel]:
    """Ranks that make their process group themselves."""
    with shared_kernel(2) as kernel:
        kernel.ok("%distributed stop")
        kernel.ok("%distributed start -n 2 --no-init")
        yield kernel


@pytest.fixture(scope="module")
def port() -> int:
    """A port on which nobody listens."""
    return free_port()


@pytest.mark.parametrize(
    "arguments",
    [
        "",
        "'gloo'",
        "backend='cpu:gloo'",
        "init_method='env://'",
        "'gloo', rank=rank, world_size=world_size",
        "timeout=datetime.timedelta(seconds=5)",
    ],
)
def test_a_group_like_the_session_s_is_the_session_s(arguments: str, ranks: Kernel) -> None:
    outcome = ranks.ok(
        "%%distributed\nimport datetime, torch, torch.distributed as dist\n"
        f"before = dist.group.WORLD\ndist.init_process_group({arguments})\n"
        "total = torch.ones(1)\ndist.all_reduce(total)\nprint(total.item(), dist.group.WORLD is before)"
    )
    assert {rank: lines[-1] for rank, lines in outcome.lines.items()} == {0: "2.0 True", 1: "2.0 True"}


def test_that_the_session_s_group_is_used_is_reported_once(own_ranks: Kernel) -> None:
    code = "%%distributed\nimport torch.distributed as dist\ndist.init_process_group('gloo')"
    assert "returns the session's process group" in own_ranks.ok(code).stdout
    assert own_ranks.ok(code).stdout == ""


@pytest.mark.parametrize(
    ("arguments", "asked", "advice"),
    [
        ("'nccl'", "backend='nccl'", "--backend nccl"),
        ("world_size=5, rank=0", "world_size=5", "--no-init"),
        ("rank=7", "rank=7", "--no-init"),
        ("store=dist.HashStore(), rank=rank, world_size=2", "a store of its own", "--no-init"),
    ],
)
def test_a_group_that_the_session_can_not_be_is_refused_with_what_to_start(
    arguments: str, asked: str, advice: str, ranks: Kernel
) -> None:
    outcome = ranks.fails(
        f"%%distributed\nimport torch.distributed as dist\ndist.init_process_group({arguments})", "RankError"
    )
    assert f"UsageError: init_process_group asks for {asked}" in outcome.evalue and advice in outcome.evalue


def test_a_group_of_the_tutorial_meets_where_the_script_says(own_group: Kernel, port: int) -> None:
    own_group.ok(f"%%distributed\n{TUTORIAL.format(port=port)}")
    for _ in range(3):  # the port is free again each time
        assert own_group.ok("%%distributed\nprint(train(rank, world_size))").lines == both("2.0")


def test_a_group_of_the_tutorial_meets_where_the_script_says_in_a_launch(notebook: Kernel, port: int) -> None:
    notebook.ok(f"import nbdist\n{TUTORIAL.format(port=port)}")
    notebook.ok("found = nbdist.notebook_launcher(lambda: train(int(os.environ['RANK']), 2), num_processes=2)")
    assert notebook.value("found") == [2.0, 2.0]


def test_ranks_do_not_look_like_a_prompt(ranks: Kernel) -> None:
    """Lightning refuses strategies of several processes where `sys.ps1` is set."""
    assert ranks.ok("%%distributed\nimport sys\nprint(hasattr(sys, 'ps1'))").lines == both("False")


def test_a_script_does_not_see_the_arguments_of_the_kernel(ranks: Kernel) -> None:
    code = "import argparse\nparser = argparse.ArgumentParser()\nparser.add_argument('--lr', default=3)\n"
    outcome = ranks.ok(f"%%distributed\n{code}print(parser.parse_args().lr)")
    assert outcome.lines == both("3")


def test_nbdist_is_among_the_names_of_a_rank(ranks: Kernel) -> None:
    assert ranks.ok("%%distributed\nprint(nbdist.Plan().strategy is not None)").lines == both("True")


@pytest.mark.parametrize("call", ["mp.spawn(train, nprocs=2)", "mp.start_processes(train, nprocs=2)"])
def test_spawning_a_function_of_a_cell_is_refused_with_what_to_call(call: str, ranks: Kernel) -> None:
    code = f"import torch.multiprocessing as mp\ndef train(index): pass\n{call}"
    outcome = ranks.fails(f"%%distributed\n{code}", "RankError")
    assert "mp.spawn can't run 'train'" in outcome.evalue and "nbdist.notebook_launcher(train, ...)" in outcome.evalue


SPAWNING = """
import torch.multiprocessing as mp
def train(index):
    print("started", index, flush=True)
if __name__ == "__main__":
    mp.spawn(train, nprocs=1)
"""


def test_a_program_that_spawns_its_own_function_runs_as_it_is(ranks: Kernel, tmp_path: Path) -> None:
    (tmp_path / "spawning.py").write_text(SPAWNING)
    assert ranks.ok(f"%%distributed -r 0\n%run {tmp_path}/spawning.py").lines == {0: ["started 0"]}


def test_a_program_that_spawns_the_ranks_of_the_tutorial_runs_on_one_rank(
    ranks: Kernel, port: int, tmp_path: Path
) -> None:
    spawn = "def run(rank):\n    print(f'sum {train(rank, 2)}\\n', end='', flush=True)\n"  # each line in one write
    spawn += "if __name__ == '__main__':\n    import torch.multiprocessing as mp\n    mp.spawn(run, nprocs=2)\n"
    (tmp_path / "tutorial.py").write_text(TUTORIAL.format(port=port) + spawn)
    before = ranks.ok("%%distributed -r 0\nimport os\nprint(dict(os.environ))").stdout
    assert ranks.ok(f"%%distributed -r 0\n%run {tmp_path}/tutorial.py").lines == {0: ["sum 2.0", "sum 2.0"]}
    assert ranks.ok("%%distributed -r 0\nprint(dict(os.environ))").stdout == before


SPAWNED_GROUP = """
import torch, torch.distributed as dist, torch.multiprocessing as mp
def train(index):
    dist.init_process_group("gloo", rank=index, world_size=2)
    total = torch.ones(1)
    dist.all_reduce(total)
    print(f"sum {total.item()}\\n", end="", flush=True)
    dist.destroy_process_group()
if __name__ == "__main__":
    mp.spawn(train, nprocs=2)
"""


def test_spawned_processes_that_are_told_no_address_meet_at_one_of_their_own(ranks: Kernel, tmp_path: Path) -> None:
    (tmp_path / "grouped.py").write_text(SPAWNED_GROUP)
    before = ranks.ok("%%distributed -r 0\nimport os\nprint(dict(os.environ))").stdout
    assert ranks.ok(f"%%distributed -r 0\n%run {tmp_path}/grouped.py").lines == {0: ["sum 2.0", "sum 2.0"]}
    assert ranks.ok("%%distributed -r 0\nprint(dict(os.environ))").stdout == before
    assert ranks.ok(f"%%distributed\n{SUM}").lines == both("2.0")


def test_a_program_that_spawns_on_several_ranks_says_that_they_are_ranks_already(ranks: Kernel, tmp_path: Path) -> None:
    (tmp_path / "twice.py").write_text(SPAWNING)
    line = "nbdist: mp.spawn starts 1 process on each rank"
    lines = ranks.ok(f"%%distributed\n%run {tmp_path}/twice.py").lines
    assert all(
        of[0].startswith(line) and "`train(rank, ...)`" in of[0] and of[1] == "started 0" for of in lines.values()
    )


def test_spawning_a_function_of_a_program_that_has_ended_says_where_it_is_from(ranks: Kernel, tmp_path: Path) -> None:
    (tmp_path / "spawned.py").write_text(SPAWNING)
    ranks.ok(f"%%distributed -r 0\n%run {tmp_path}/spawned.py")
    outcome = ranks.fails("%%distributed -r 0\nmp.spawn(train, nprocs=1)", "RankError")
    assert "it is defined in spawned.py, which was run as a program and has ended" in outcome.evalue


def test_forking_a_function_of_a_cell_works(ranks: Kernel) -> None:
    code = "import torch.multiprocessing as mp\ndef train(index): print('started', index)\n"
    outcome = ranks.ok(f"%%distributed -r 0\n{code}mp.start_processes(train, nprocs=1, start_method='fork')")
    assert outcome.lines == {0: ["started 0"]}


FORKED_GROUP = """
import os, torch, torch.distributed as dist, torch.multiprocessing as mp
def train(index):
    {port}
    dist.init_process_group("gloo", rank=index, world_size=2)
    total = torch.ones(1)
    dist.all_reduce(total)
    print(f"sum {{total.item()}}\\n", end="", flush=True)
mp.start_processes(train, nprocs=2, start_method="fork")
"""


def test_forked_processes_that_would_meet_at_the_rank_s_address_say_what_to_do(ranks: Kernel) -> None:
    """As Lightning's strategy "ddp_notebook" has them do."""
    outcome = ranks.fails(f"%%distributed -r 0\n{FORKED_GROUP.format(port='pass')}", "RankError")
    assert "a rank has started this process" in outcome.traceback
    assert "strategy='ddp' in place of 'ddp_notebook'" in outcome.traceback


def test_forked_processes_can_have_a_group_of_their_own(ranks: Kernel, port: int) -> None:
    own = f"os.environ['MASTER_PORT'] = '{port}'"
    outcome = ranks.ok(f"%%distributed -r 0\n{FORKED_GROUP.format(port=own)}")
    assert outcome.lines == {0: ["sum 2.0", "sum 2.0"]}
    assert ranks.ok(f"%%distributed\n{SUM}").lines == both("2.0")


def test_bars_of_rich_move_and_leave_their_last_state(ranks: Kernel, tmp_path: Path) -> None:
    code = (
        "import pathlib, time\nfrom rich.progress import track\n"
        "for step in track(range(4), description=f'rank {rank}', auto_refresh=False):\n"
        f"    while step == 2 and not pathlib.Path({str(tmp_path / 'go')!r}).exists(): time.sleep(0.01)\n"
    )
    running = ranks.start(f"%%distributed -r 0\n{code}")
    running.wait_until(lambda outcome: " 50%" in outcome.stdout, "the bar to move")
    (tmp_path / "go").touch()
    shown = running.finish().stdout
    assert "\x1b[2K" not in shown and "\x1b[?25" not in shown
    [line] = screen(shown)
    assert line.startswith("[0] rank 0") and "100%" in line


SUM = "import torch, torch.distributed as dist\ntotal = torch.ones(1)\ndist.all_reduce(total)\nprint(total.item())"
AGAIN = "the default process group, which a cell had destroyed, was recreated"


@pytest.mark.torch_private
def test_after_a_script_has_destroyed_the_group_the_next_cell_has_one_again(ranks: Kernel) -> None:
    for _ in range(3):
        ranks.ok("%%distributed\nimport torch.distributed as dist\ndist.destroy_process_group()")
        outcome = ranks.ok(f"%%distributed\n{SUM}")
        assert outcome.stdout.count("2.0") >= 1 and AGAIN in outcome.stdout + outcome.stderr + str(outcome.plain)
        assert ranks.ok(f"%%distributed\n{SUM}").lines == both("2.0")


@pytest.mark.torch_private
def test_a_group_that_one_rank_has_destroyed_is_made_again_on_all(ranks: Kernel) -> None:
    ranks.ok("%%distributed -r 0\nimport torch.distributed as dist\ndist.destroy_process_group()")
    ranks.ok("%%distributed\npass")
    assert ranks.ok(f"%%distributed\n{SUM}").lines == both("2.0")


@pytest.mark.torch_private
def test_a_group_that_a_failed_script_has_destroyed_is_made_again(ranks: Kernel) -> None:
    code = "import torch.distributed as dist\nif rank == 0: dist.destroy_process_group()\n1/0"
    ranks.fails(f"%%distributed\n{code}", "RankError")
    ranks.ok("%%distributed\npass")
    assert ranks.ok(f"%%distributed\n{SUM}").lines == both("2.0")


def test_a_cell_on_some_ranks_runs_without_a_group(ranks: Kernel) -> None:
    ranks.ok("%%distributed\nimport torch.distributed as dist\ndist.destroy_process_group()")
    assert ranks.ok("%%distributed -r 1\nprint(dist.is_initialized())").lines == {1: ["False"]}
    ranks.ok("%%distributed\npass")


def test_ranks_that_make_their_own_group_get_none_after_destroying_it(own_group: Kernel) -> None:
    code = "import torch.distributed as dist\ndist.init_process_group('gloo')\ndist.destroy_process_group()"
    own_group.ok(f"%%distributed\n{code}")
    assert own_group.ok("%%distributed\nprint(dist.is_initialized())").lines == both("False")


def run(kernel: Kernel, program: str) -> dict[int, list[str]]:
    """Run a program of tests/programs on all ranks; what each of them prints."""
    return kernel.ok(f"%%distributed\n%run {PROGRAMS}/{program}").lines


def last(lines: dict[int, list[str]]) -> set[str]:
    """The last line of each rank."""
    return {printed[-1] for printed in lines.values()}


def test_a_program_with_settings_as_globals_trains_as_in_one_process(ranks: Kernel) -> None:
    done = subprocess.run([sys.executable, PROGRAMS / "gpt.py"], capture_output=True, text=True, check=True)
    for _ in range(2):
        assert last(run(ranks, "gpt.py")) == {done.stdout.strip()}
    assert "done after 2 steps" in last(run(ranks, "gpt.py --steps=2")).pop()


def test_a_program_with_snapshots_goes_on_from_them(ranks: Kernel, tmp_path: Path) -> None:
    assert last(run(ranks, f"snapshots.py 2 {tmp_path}/snapshot.pt")) == {"epoch 1, 4 batches"}
    second = run(ranks, f"snapshots.py 3 {tmp_path}/snapshot.pt --batch-size 16")
    assert all("resuming after epoch 2" in lines for lines in second.values())
    assert last(second) == {"epoch 2, 2 batches"}


def test_a_program_for_fsdp2_saves_and_loads(ranks: Kernel, tmp_path: Path) -> None:
    assert last(run(ranks, f"fsdp2.py --folder {tmp_path}")) == {"saved"}
    assert all(lines[-2:] == ["loaded", "saved"] for lines in run(ranks, f"fsdp2.py --folder {tmp_path}").values())


def test_a_program_for_tensor_parallelism_trains_alike_on_all_ranks(ranks: Kernel) -> None:
    first = last(run(ranks, "tensor_parallel.py"))
    assert len(first) == 1 and first == last(run(ranks, "tensor_parallel.py"))


def test_a_program_for_accelerate_counts_each_sample_once(ranks: Kernel, tmp_path: Path) -> None:
    for _ in range(2):
        assert run(ranks, f"with_accelerate.py --folder {tmp_path}")[0][-1].endswith("of 50 right on 2 processes")


@pytest.mark.slow
def test_a_program_with_features_of_accelerate_trains_as_under_torchrun(ranks: Kernel) -> None:
    program = PROGRAMS / "accelerate_features.py"
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(program)]
    done = subprocess.run(torchrun, capture_output=True, text=True, check=True)
    for _ in range(2):
        assert run(ranks, program.name) == {0: [done.stdout.strip()]}


def test_each_program_finds_the_modules_beside_itself(ranks: Kernel, tmp_path: Path) -> None:
    for name in ("first", "second"):
        (tmp_path / name / "parts").mkdir(parents=True)
        (tmp_path / name / "beside.py").write_text(f"NAME = '{name}'")
        (tmp_path / name / "parts" / "deep.py").write_text(f"NAME = '{name}'")
        program = "import beside, parts.deep\nprint(beside.NAME, parts.deep.NAME)"
        (tmp_path / name / "train.py").write_text(program)
    for name in ("first", "second", "first"):
        assert ranks.ok(f"%%distributed\n%run {tmp_path}/{name}/train.py").lines == both(f"{name} {name}")


def test_a_module_that_no_other_program_has_stays_for_pickle(ranks: Kernel, tmp_path: Path) -> None:
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
    (tmp_path / "first" / "only_here.py").write_text("class Model: pass")
    (tmp_path / "first" / "train.py").write_text("import only_here\nmodel = only_here.Model()")
    (tmp_path / "second" / "train.py").write_text("pass")
    ranks.ok(f"%%distributed\n%run {tmp_path}/first/train.py")
    ranks.ok(f"%%distributed\n%run {tmp_path}/second/train.py")
    outcome = ranks.ok("%%distributed\nimport pickle\nprint(type(pickle.loads(pickle.dumps(model))) is type(model))")
    assert outcome.lines == both("True")


@pytest.mark.torch_private
def test_a_group_that_is_made_again_after_a_failure_is_whole(ranks: Kernel) -> None:
    """Nothing that was known of the destroyed group, which had been cut, holds for the new one."""
    code = "import torch, torch.distributed as dist\nif rank == 0: 1/0\ndist.all_reduce(torch.ones(1))"
    for _ in range(2):
        ranks.fails(f"%%distributed\n{code}", "RankError")
        ranks.ok("%%distributed\ndist.destroy_process_group()")
        for _ in range(2):
            assert {lines[-1] for lines in ranks.ok(f"%%distributed\n{SUM}").lines.values()} >= {"2.0"}
