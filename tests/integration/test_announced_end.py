"""The end of an allocation that is announced: by SIGUSR1, which ends nothing, and by SIGTERM, after a grace."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from testbed.kernel import Execution, Kernel, both, kernel_with_ranks, wait_until
from tests.support.roles import alive, await_end, family, find, find_store

GRACE = 20.0  # seconds for an end that waits for 4
ROLES = ["controller", "agent", "rank", "notebook"]
WAIT = """\
%%distributed
import os, time
print('busy', flush=True)
while not os.path.exists({gate!r}):
    time.sleep(0.01)
kept = rank"""

roles = pytest.mark.parametrize("role", ROLES)


def process(kernel: Kernel, role: str) -> int:
    if role == "notebook":
        return kernel.pid
    return kernel.rank_pids()[1] if role == "rank" else find(kernel.pid, role)


def waiting(kernel: Kernel, gate: Path) -> Execution:
    """A cell that runs until the gate is there."""
    cell = kernel.start(WAIT.format(gate=str(gate)))
    cell.wait_for_ranks(2, "busy")
    return cell


def told(kernel: Kernel) -> str:
    """What `status` says of the end."""
    return next((line for line in kernel.ok("%distributed status").stdout.splitlines() if " ends " in line), "")


@roles
def test_a_warning_ends_nothing_and_names_who_has_got_it(role: str, own_ranks: Kernel, tmp_path: Path) -> None:
    everyone, pid = family(own_ranks.pid), process(own_ranks, role)
    cell = waiting(own_ranks, tmp_path / "gate")
    os.kill(pid, signal.SIGUSR1)
    name = {"rank": "rank 1", "notebook": "the notebook's kernel"}.get(role, f"the session's {role}")
    cell.wait_for(f"SIGUSR1 has reached {name} (pid {pid}): the allocation ends soon")
    (tmp_path / "gate").touch()
    cell.finish()
    assert own_ranks.ok("%%distributed\nprint(kept)").lines == {0: ["0"], 1: ["1"]}
    assert all(map(alive, everyone))
    assert told(own_ranks).startswith("the allocation ends soon (SIGUSR1 at ")
    assert "SIGUSR1 at" in own_ranks.ok("%distributed panel --text").stdout
    own_ranks.ok("%distributed restart")
    assert told(own_ranks) == ""


def test_a_warning_to_all_processes_is_one_line(own_ranks: Kernel) -> None:
    everyone = family(own_ranks.pid)
    cell = own_ranks.start("%%distributed\npass")
    cell.finish()
    for pid in everyone:
        os.kill(pid, signal.SIGUSR1)
    cell.wait_late("the allocation ends soon")
    assert own_ranks.ok("%%distributed\nprint('well')").lines == both("well")
    assert all(map(alive, everyone))
    assert (cell.outcome.stdout + cell.outcome.stderr).count("SIGUSR1") == 1


def test_the_template_and_the_store_take_no_notice_of_a_warning(own_ranks: Kernel) -> None:
    for pid in (find(own_ranks.pid, "template"), find_store(own_ranks)):
        os.kill(pid, signal.SIGUSR1)
    own_ranks.ok("%%distributed -r 1\nimport os, signal, time\nprint('well')")
    own_ranks.fails("%%distributed -r 1\nos.kill(os.getpid(), signal.SIGKILL)", "RankDied")
    assert "replaced" in own_ranks.ok("%distributed heal").stdout


def test_a_handler_of_the_users_own_is_called_as_in_a_program(own_ranks: Kernel, tmp_path: Path) -> None:
    own_ranks.ok("%%distributed\nimport signal\nsignal.signal(signal.SIGUSR1, lambda *_: print('mine', flush=True))")
    pid = process(own_ranks, "rank")
    cell = waiting(own_ranks, tmp_path / "gate")
    os.kill(pid, signal.SIGUSR1)
    cell.wait_for("[1] mine")
    (tmp_path / "gate").touch()
    assert "SIGUSR1" not in cell.finish().stderr
    assert told(own_ranks) == ""


def test_a_handler_in_the_notebook_stays(kernel: Kernel) -> None:
    kernel.ok("import os, signal\nsignal.signal(signal.SIGUSR1, lambda *_: print('mine'))\n%load_ext nbdist")
    assert kernel.ok("os.kill(os.getpid(), signal.SIGUSR1)").stdout == "mine\n"


def test_a_worker_of_a_data_loader_outlives_a_warning_and_can_be_terminated(own_ranks: Kernel) -> None:
    own_ranks.ok(
        "%%distributed\nimport multiprocessing, time\n"
        "worker = multiprocessing.get_context('fork').Process(target=time.sleep, args=(600,), daemon=True)\n"
        "worker.start()"
    )
    pids = [int(lines[0]) for lines in own_ranks.ok("%%distributed\nprint(worker.pid)").lines.values()]
    for pid in pids:
        os.kill(pid, signal.SIGUSR1)
    own_ranks.ok("%%distributed\nworker.terminate()\nworker.join()")
    assert own_ranks.ok("%%distributed\nprint(worker.exitcode)").lines == both("-15")


@pytest.fixture
def with_grace() -> Iterator[Kernel]:
    with kernel_with_ranks(2, "--end-grace 4") as kernel:
        yield kernel


@pytest.mark.parametrize("role", ["controller", "agent", "rank"])
def test_sigterm_leaves_time_to_save_and_then_ends(role: str, with_grace: Kernel, tmp_path: Path) -> None:
    kernel, pid = with_grace, process(with_grace, role)
    others = kernel.rank_pids()
    cell = waiting(kernel, tmp_path / "gate")
    os.kill(pid, signal.SIGTERM)
    name = "rank 1" if role == "rank" else f"the session's {role}"
    cell.wait_for(f"SIGTERM has reached {name} (pid {pid}): it ends in 4 s")
    (tmp_path / "gate").touch()
    cell.finish()
    assert kernel.value("__import__('nbdist').get_session().pull('kept')") == [0, 1]
    assert "(SIGTERM at " in told(kernel)
    await_end([pid] if role == "rank" else others, GRACE)
    if role != "rank":
        assert "SIGTERM" in kernel.fails("%%distributed\nkept", "SessionBroken").evalue
        kernel.ok("%distributed start -n 2")


def test_sigterm_to_all_processes_leaves_time_to_save(with_grace: Kernel) -> None:
    everyone = [pid for pid in family(with_grace.pid) if pid != with_grace.pid]
    assert with_grace.ok("%%distributed\nkept = rank").status == "ok"
    for pid in everyone:
        os.kill(pid, signal.SIGTERM)
    assert with_grace.value("__import__('nbdist').get_session().pull('kept')") == [0, 1]
    await_end(everyone, GRACE)


def test_without_a_grace_sigterm_ends_the_session_at_once(own_ranks: Kernel) -> None:
    others = own_ranks.rank_pids()
    os.kill(find(own_ranks.pid, "controller"), signal.SIGTERM)
    await_end(others)
    wait_until(lambda: not psutil.Process(own_ranks.pid).children(), "the rest to end")


# --- an end that is known before


def test_an_end_that_is_near_is_said_once_and_shown_until_then(kernel: Kernel, tmp_path: Path) -> None:
    kernel.ok("%load_ext nbdist")
    started = kernel.ok("%distributed start -n 2 --time-left 'echo 100' --warn 99").stdout
    assert re.search(r"^the allocation ends in \d+ s, at \d\d:\d\d \(--time-left\)$", started, re.MULTILINE), started
    shown = re.compile(r"the allocation ends in \d+ s, at \d\d:\d\d \(--time-left\)")
    assert shown.match(told(kernel)) and shown.search(kernel.ok("%distributed panel --text").stdout)
    assert 0 < kernel.value("__import__('nbdist').get_session().time_left") < 100
    kernel.ok("%distributed stop")
    command = tmp_path / "left.sh"
    command.write_text(f"left=$(({int(time.time()) + 10} - $(date +%s)))\necho $((left > 0 ? left : 0))")
    kernel.ok(f"%distributed start -n 2 --time-left 'sh {command}'")
    cell = waiting(kernel, tmp_path / "gate")
    cell.wait_for("nbdist: the allocation ends in ")  # less than ten minutes, so at half of the time
    (tmp_path / "gate").touch()
    cell.finish()
    assert cell.outcome.stderr.count("the allocation ends") == 1
    wait_until(lambda: told_of_past(kernel), "the end to be over")


def told_of_past(kernel: Kernel) -> bool:
    return "the allocation was to end before now (--time-left)" in kernel.ok("%distributed status").stdout


def test_the_end_of_the_job_is_known_without_a_flag_and_to_who_attaches(tmp_path: Path) -> None:
    end = str(int(time.time()) + 3600)
    with Kernel(SLURM_JOB_END_TIME=end) as first, Kernel() as second:
        first.ok("%load_ext nbdist\n%distributed start -n 1")
        assert "(SLURM_JOB_END_TIME)" in told(first)
        first.ok("%distributed detach --linger 60")
        second.ok("%load_ext nbdist\n%distributed attach")
        assert re.match(r"the allocation ends in \d+ min, at \d\d:\d\d \(SLURM_JOB_END_TIME\)", told(second))
        second.ok("%distributed stop")


@pytest.mark.parametrize("flags", ["--until 6pm", "--time-left false", "--until 23:59 --time-left 'echo 1'"])
def test_what_does_not_tell_the_end_starts_nothing(flags: str, kernel: Kernel) -> None:
    kernel.ok("%load_ext nbdist")
    kernel.fails(f"%distributed start -n 2 {flags}", "UsageError")
    assert kernel.value("__import__('nbdist').client.session.current.current_session()") is None


# --- ranks that are idle


def test_idle_ranks_are_announced_to_end_and_then_end(kernel: Kernel) -> None:
    kernel.ok("%load_ext nbdist\nhere = 5")
    kernel.ok("%distributed start -n 2 --idle 4s")
    pids = kernel.rank_pids()
    cell = kernel.start("%%distributed\npass")
    cell.finish()
    cell.wait_late("the ranks are idle, and end in 2 s, at ")
    cell.wait_late("the ranks have ended, as no cell had run on them for 4 s (`start --idle`)")
    await_end(pids)
    assert "`%distributed start` starts new ranks" in kernel.fails("%%distributed\npass", "SessionClosed").evalue
    assert kernel.value("here") == 5
    assert "2 ranks ready" in kernel.ok("%distributed start -n 2").stdout


def test_a_cell_keeps_the_ranks_from_ending(kernel: Kernel) -> None:
    kernel.ok("%load_ext nbdist")
    kernel.ok("%distributed start -n 2 --idle 3s")
    cell = kernel.start("%%distributed\npass")
    cell.finish()
    cell.wait_late("the ranks are idle")
    kernel.ok("%%distributed\nimport time\ntime.sleep(4)  # longer than ranks may be idle\nkept = rank")
    assert "--idle" not in told(kernel)
    assert kernel.ok("%%distributed\nprint(kept)").lines == {0: ["0"], 1: ["1"]}
