from __future__ import annotations

from pathlib import Path

import pytest

from testbed.kernel import Kernel, both, wait_until
from tests.support.roles import revive

HANG = 20.0


@pytest.fixture
def own(ranks: Kernel) -> Kernel:
    """The shared kernel with two living ranks that know `kept`."""
    revive(ranks)
    ranks.ok("%%distributed\nimport os, signal, sys, time, torch, torch.distributed as dist\nkept = rank + 10")
    return ranks


def kept(kernel: Kernel, rank: int) -> bool:
    return kernel.ok(f"%%distributed -r {rank}\nprint(kept)").stdout == f"[{rank}] {rank + 10}\n"


def test_the_report_has_rank_pid_signal_last_words_and_what_it_was_running(own: Kernel) -> None:
    pid = own.rank_pids()[1]
    last_words = "print('about to go', file=sys.stderr)"
    code = f"if rank == 1:\n    {last_words}\n    os.kill(os.getpid(), signal.SIGKILL)\ntime.sleep(60)"
    outcome = own.fails(f"%%distributed\n{code}", "RankDied", HANG)
    lines = outcome.traceback.splitlines()
    assert lines[0].startswith("rank 1 died: SIGKILL (killed; often by the system when memory runs out), ") or (
        "rank 1 died: SIGKILL (killed; often by the system when memory runs out), " in lines[0]
    )
    assert f"pid {pid}, while it ran cell " in lines[0] and "if rank == 1:" in lines[0]
    assert lines[1:3] == ["its last lines on stderr:", "  about to go"]
    assert "rank 0: interrupted, because rank 1 failed" in lines
    assert lines[-1] == ("`%distributed heal` replaces it. Rank 0 kept its variables: `%%distributed -r 0`.")
    assert kept(own, 0)


def test_a_segfault_shows_where_python_was(own: Kernel) -> None:
    outcome = own.fails(
        "%%distributed -r 0\nimport ctypes\ndef crash():\n    ctypes.string_at(0)\ncrash()", "RankDied", HANG
    )
    assert "SIGSEGV (segmentation fault)" in outcome.evalue
    assert "Fatal Python error: Segmentation fault" in outcome.traceback and "in crash" in outcome.traceback


def test_the_error_can_be_caught_and_asked(own: Kernel) -> None:
    own.ok(
        "import nbdist\ntry:\n    get_ipython().run_cell_magic('distributed', '-r 1', 'os._exit(3)')\n"
        "except nbdist.RankDied as error:\n    first = error.first; ranks = sorted(error.failures)"
    )
    assert own.value("(first.rank, first.kind, 'exit code 3' in first.text, ranks)") == (1, "died", True, [1])


def test_survivors_are_interrupted_in_sleep(own: Kernel, tmp_path: Path) -> None:
    gate = str(tmp_path / "gate")
    code = f"""
from tests.support.gates import await_gate, open_inside
if rank == 0:
    await_gate({gate!r})
    os._exit(3)
def stay(): time.sleep(60)
open_inside("stay", {gate!r})
try:
    stay()
finally:
    ended = 'here'"""
    own.fails(f"%%distributed{code}", "RankDied", HANG)
    assert own.value("__import__('nbdist').get_session().pull('ended', ranks=1)") == "here"


@pytest.mark.parametrize("rank", [0, 1])
def test_survivors_in_a_collective_with_the_dead_are_free_and_keep_their_variables(
    own: Kernel, rank: int, tmp_path: Path
) -> None:
    code = f"""
from tests.support.gates import await_gate, open_inside
if rank == {rank}:
    await_gate({str(tmp_path / "gate")!r})
    os._exit(3)
open_inside("all_reduce", {str(tmp_path / "gate")!r})
dist.all_reduce(torch.ones(1))"""
    outcome = own.fails(f"%%distributed\n{code}", "RankDied", HANG)
    assert f"rank {rank} died: exit code 3" in outcome.evalue
    assert f"rank {1 - rank}: " in outcome.traceback
    assert kept(own, 1 - rank)


def test_all_that_the_dead_had_printed_is_shown_before_the_error(own: Kernel) -> None:
    code = "for number in range(10000):\n    print(number)\nos._exit(3)"
    outcome = own.fails(f"%%distributed -r 1\n{code}", "RankDied", HANG)
    assert outcome.stdout == "".join(f"[1] {number}\n" for number in range(10000))
    kinds = [kind for kind, _ in outcome.events if kind in ("stream", "error")]
    assert kinds[-1] == "error"


def test_two_ranks_that_die_are_both_named(own: Kernel) -> None:
    outcome = own.fails("%%distributed\nos._exit(3 + rank)", "RankDied", HANG)
    assert "rank 0 died: exit code 3" in outcome.traceback or "rank 0: died: exit code 3" in outcome.traceback
    assert "rank 1 died: exit code 4" in outcome.traceback or "rank 1: died: exit code 4" in outcome.traceback
    assert "died (" in own.fails("%%distributed\n1", "UsageError").evalue


def test_an_exit_by_the_user_ends_the_cell_not_the_rank(own: Kernel) -> None:
    pids = own.rank_pids()
    own.run("%%distributed\nsys.exit(3)")
    assert kept(own, 1) and own.rank_pids() == pids


def test_a_death_while_a_value_is_pulled_pushed_or_a_function_is_called_is_named(own: Kernel) -> None:
    for line in ("s.pull('os._exit(3)', ranks=1)", "s.call(__import__('os')._exit, 3, ranks=[1])"):
        own.ok("import nbdist; s = nbdist.get_session()")
        outcome = own.fails(line, "RankDied", HANG)
        assert "rank 1 died: exit code 3" in outcome.evalue
        own.ok("%distributed restart")
        own.ok("%%distributed\nimport os")


def test_a_death_in_a_background_cell_is_shown_below_it_and_raised_by_wait(own: Kernel, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    wait = f"while not os.path.exists({str(gate)!r}): time.sleep(0.01)"
    own.ok(f"%%distributed --background -r 1 --capture later\n{wait}\nos._exit(3)")
    gate.touch()
    states = "[row['state'] for row in __import__('nbdist').get_session().status()]"
    wait_until(lambda: own.value(states) == ["idle", "dead"], "the death to be known")
    wait_until(lambda: own.value("later[1].error is not None"), "the failure")
    assert "exit code 3" in own.value("later[1].error.text")


def test_status_names_the_dead_and_how_they_ended(own: Kernel) -> None:
    own.fails("%%distributed -r 0\nos.kill(os.getpid(), signal.SIGTERM)", "RankDied", HANG)
    rows = [line.split() for line in own.ok("%distributed status").stdout.splitlines()]
    assert [row[3] for row in rows[1:]] == ["dead", "idle"] and "SIGTERM" in rows[1]


def test_a_dead_worker_of_a_data_loader_is_the_ranks_own_error(own: Kernel) -> None:
    code = (
        "from torch.utils.data import DataLoader, Dataset\n"
        "class Items(Dataset):\n    def __len__(self): return 8\n"
        "    def __getitem__(self, index): os.kill(os.getpid(), signal.SIGKILL)\n"
        "next(iter(DataLoader(Items(), num_workers=1)))"
    )
    outcome = own.fails(f"%%distributed -r 0\n{code}", "RankError", HANG)
    assert "DataLoader worker" in outcome.traceback and "killed by signal" in outcome.traceback
    assert kept(own, 0)


def test_a_restart_brings_up_a_fresh_set_in_the_same_kernel(own: Kernel) -> None:
    own.fails("%%distributed -r 1\nos._exit(3)", "RankDied", HANG)
    own.ok("%distributed restart")
    assert own.ok("%%distributed\nprint('kept' in globals())").lines == both("False")
