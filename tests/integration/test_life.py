from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from testbed.kernel import Kernel, both, kernel_with_ranks, wait_until
from tests.support.leftovers import files_of_sessions
from tests.support.roles import alive, await_end, await_role, family, find

HANG = 20.0


def await_nothing(pids: list[int]) -> None:
    """Until these processes and all files of sessions have gone; the promise is 5 s."""
    await_end(pids)
    wait_until(lambda: not files_of_sessions(), f"files to go: {files_of_sessions()}", 5.0)


@pytest.mark.parametrize(
    ("moment", "death"),
    [
        ("idle", "os._exit(3)"),
        ("in a cell", "os.kill(os.getpid(), signal.SIGTERM)"),
    ],
)
def test_nothing_outlives_a_kernel_that_dies(own_ranks: Kernel, moment: str, death: str, tmp_path: Path) -> None:
    everyone = family(own_ranks.pid)
    own_ranks.ok("import os, signal, threading, time")
    if moment == "in a cell":
        gate = tmp_path / "gate"
        wait = f"while not os.path.exists({str(gate)!r}): time.sleep(0.01)"
        own_ranks.ok(f"def die():\n    {wait}\n    {death}\nthreading.Thread(target=die, daemon=True).start()")
        own_ranks.start("%%distributed\nimport time\nprint('busy')\ntime.sleep(60)").wait_for("busy")
        gate.touch()
    else:
        own_ranks.start(death)
    await_nothing(everyone)


def test_nothing_outlives_a_kernel_that_is_killed_in_start_up(kernel: Kernel) -> None:
    kernel.ok("import os; os.environ['NBDIST_PREWARM'] = '0'")
    kernel.ok("%load_ext nbdist")
    start = kernel.start("%distributed start -n 2")
    start.wait_for("importing torch")
    everyone = family(kernel.pid)
    os.kill(kernel.pid, signal.SIGKILL)
    await_nothing(everyone)


def test_a_start_that_is_interrupted_once_or_twice_says_so_in_one_line_and_the_next_works(kernel: Kernel) -> None:
    kernel.ok("import os; os.environ['NBDIST_PREWARM'] = '0'")
    kernel.ok("%load_ext nbdist")
    for times in (1, 2):
        start = kernel.start("%distributed start -n 2")
        start.wait_for("importing torch")
        started = [pid for pid in family(kernel.pid) if pid != kernel.pid]
        for _ in range(times):
            kernel.interrupt()
        outcome = start.finish()
        assert outcome.traceback == "KeyboardInterrupt: the start was interrupted; no ranks are running"
        await_nothing(started)
    kernel.ok("%distributed start -n 2", HANG)


# --- an orderly end


def test_a_kernel_that_only_loaded_the_extension_leaves_nothing() -> None:
    with Kernel() as kernel:
        kernel.ok("%load_ext nbdist")
        await_role(kernel.pid, "template")
        everyone = family(kernel.pid)
    await_nothing(everyone)


def test_a_kernel_that_ends_while_its_controller_comes_up_leaves_nothing() -> None:
    with Kernel() as kernel:
        kernel.ok("%load_ext nbdist")
        everyone = family(kernel.pid)
    await_nothing(everyone)


def test_loading_the_extension_starts_nothing_when_told_so() -> None:
    with Kernel(NBDIST_PREWARM="0") as kernel:
        kernel.ok("%load_ext nbdist")
        assert not find(kernel.pid, "controller") and not find(kernel.pid, "agent")


def test_a_restarted_kernel_finds_nothing_of_the_old_one_and_starts_anew(own_ranks: Kernel) -> None:
    old = [pid for pid in family(own_ranks.pid) if pid != own_ranks.pid]
    own_ranks.manager.restart_kernel(now=False)
    own_ranks.client.wait_for_ready(timeout=HANG)
    own_ranks.pid = own_ranks.manager.provisioner.process.pid  # type: ignore[union-attr]
    await_nothing(old)
    own_ranks.ok("%load_ext nbdist")
    own_ranks.ok("%distributed start -n 2", HANG)
    assert not set(family(own_ranks.pid)) & set(old)


# --- linger


def test_ranks_outlive_a_killed_kernel_for_the_linger_time() -> None:
    with kernel_with_ranks(2, "--linger 2") as kernel:
        ranks = kernel.rank_pids()
        everyone = family(kernel.pid)
        os.kill(kernel.pid, signal.SIGKILL)
        await_end([kernel.pid])
        ended = psutil.wait_procs([psutil.Process(pid) for pid in ranks], timeout=1.0)[0]
        assert not ended and all(map(alive, ranks))
        await_nothing(everyone)


def test_an_idle_template_does_not_linger() -> None:
    with kernel_with_ranks(2, "--linger 60") as kernel:
        kernel.ok("%distributed stop")
        everyone = family(kernel.pid)
        os.kill(kernel.pid, signal.SIGKILL)
        await_nothing(everyone)


# --- others


def test_two_notebooks_side_by_side_do_not_know_of_each_other(own_ranks: Kernel) -> None:
    with kernel_with_ranks(1) as other:
        other.ok("%%distributed\nx = 'other'")
        own_ranks.ok("%%distributed\nx = 'own'")
        assert other.ok("%%distributed\nprint(x)").stdout == "[0] other\n"
        own = own_ranks.rank_pids()
        os.kill(other.pid, signal.SIGKILL)
        await_end([other.pid])
    assert own_ranks.ok("%%distributed\nprint(x)").lines == both("own")
    assert own_ranks.rank_pids() == own


def test_nothing_outlives_a_kernel_that_shuts_down_but_a_stranger_that_looks_like_one_of_ours() -> None:
    with contextlib.ExitStack() as later:
        with kernel_with_ranks(2) as kernel:
            stranger = later.enter_context(_twin(psutil.Process(find(kernel.pid, "template"))))
            kernel.fails("%%distributed -r 1\nimport os; os._exit(3)", "RankDied")
            kernel.ok("%distributed restart", HANG)
            everyone = family(kernel.pid)
        await_nothing(everyone)
        assert stranger.poll() is None


@contextlib.contextmanager
def _twin(process: psutil.Process) -> Iterator[subprocess.Popen[bytes]]:
    """A process with the command line and the environment of another, that belongs to somebody else."""
    code = "import time; print(flush=True); time.sleep(600)"
    command = [sys.executable, "-c", code, *process.cmdline()[1:]]
    environment = {**process.environ(), "RANK": "1", "LOCAL_RANK": "1"}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, start_new_session=True) as twin:
        try:
            assert twin.stdout is not None and twin.stdout.readline()
            yield twin
        finally:
            twin.kill()
