"""The fault table: every kind of death x every role x idle, in a cell, in start-up (the kernel's: test_life.py)."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import time
from collections.abc import Iterator

import pytest

from testbed.kernel import Execution, Kernel, Outcome, both, wait_until
from tests.support.leftovers import files_of_sessions
from tests.support.roles import alive, await_end, await_role, children, family, find, find_store, revive

KINDS = {
    "exit": ("os._exit(3)", "exit code 3"),
    "killed": ("os.kill(os.getpid(), signal.SIGKILL)", "SIGKILL"),
    "segfault": ("ctypes.string_at(0)", "SIGSEGV"),
    "terminated": ("os.kill(os.getpid(), signal.SIGTERM)", "SIGTERM"),
}
SIGNALS = [signal.SIGKILL, signal.SIGSEGV, signal.SIGTERM]
HANG = 20.0  # nothing here takes as long; the figures are in docs/performance.md
SLEEP = "%%distributed\nimport time\nprint('busy', flush=True)\ntime.sleep(60)"

dies = pytest.mark.parametrize("kind", KINDS)
rank_ = pytest.mark.parametrize("rank", [0, 1])
signals = pytest.mark.parametrize("number", SIGNALS, ids=lambda number: signal.Signals(number).name)
vital = pytest.mark.parametrize("role", ["template", "agent", "controller"])


@pytest.fixture
def healthy(ranks: Kernel) -> Iterator[Kernel]:
    """The shared kernel with two living ranks that know `kept`, before the test and again after it."""
    _restore(ranks)
    yield ranks


@pytest.fixture
def starting(ranks: Kernel) -> Iterator[Kernel]:
    """The shared kernel, whose next `%distributed restart` is a cold start."""
    value = ranks.value("__import__('os').environ.get('PYTHONHASHSEED', '0')")
    ranks.ok(f"import os; os.environ['PYTHONHASHSEED'] = '{(int(value) + 1) % 1000}'")
    yield ranks
    _restore(ranks)


def _restore(kernel: Kernel) -> None:
    revive(kernel)
    kernel.ok("%%distributed\nimport ctypes, os, signal, threading, time\nkept = rank + 10")
    assert kernel.value("__import__('nbdist').get_session().pull('kept')") == [10, 11]


def _living(kernel: Kernel) -> list[int]:
    return list(
        kernel.value("__import__('tests.support.inside').support.inside.living(__import__('nbdist').get_session())")
    )


def _gone(files: set[str]) -> None:
    wait_until(lambda: not files & files_of_sessions(), f"files to go: {sorted(files)}", 5.0)


def _says_what_to_type(text: str) -> bool:
    return any(f"`%distributed {verb}`" in text for verb in ("start", "restart", "heal"))


# --- a rank


@dies
@rank_
def test_a_rank_that_dies_in_a_cell_is_named_and_the_others_keep_their_variables(
    healthy: Kernel, rank: int, kind: str
) -> None:
    code, how = KINDS[kind]
    pid = healthy.rank_pids()[rank]
    cell = f"%%distributed\nif rank == {rank}:\n    {code}\ntime.sleep(60)"
    outcome = healthy.fails(cell, "RankDied", HANG)
    assert f"rank {rank} died: {how}" in outcome.evalue and f"pid {pid}" in outcome.evalue
    assert "while it ran cell" in outcome.evalue
    # Survivors have 0.3 s to stop, which a busy machine may not give them.
    stopped = f"rank {1 - rank}: (interrupted, because rank {rank} failed|still running)"
    assert re.search(stopped, outcome.traceback), str(outcome)
    assert _says_what_to_type(outcome.traceback)
    healthy.ok(f"%%distributed -r {1 - rank}\nassert kept == {1 - rank + 10}")
    assert not alive(pid)


@dies
@rank_
def test_a_rank_that_dies_between_cells_is_named_by_the_next(healthy: Kernel, rank: int, kind: str) -> None:
    code, how = KINDS[kind]
    pid = healthy.rank_pids()[rank]
    healthy.ok(
        f"%%distributed -r {rank}\nleave = threading.Event()\n"
        f"def die():\n    leave.wait()\n    {code}\n"
        "threading.Thread(target=die).start()\n"
    )
    healthy.ok(f"%%distributed -r {rank}\nthreading.Timer(0.05, leave.set).start()")
    wait_until(lambda: _living(healthy) == [1 - rank], "the death to be known")
    outcome = healthy.fails("%%distributed\nkept", "UsageError")
    assert f"rank {rank} died" in outcome.evalue and how in outcome.evalue and f"pid {pid}" in outcome.evalue
    assert _says_what_to_type(outcome.evalue)
    healthy.ok(f"%%distributed -r {1 - rank}\nassert kept == {1 - rank + 10}")


@signals
@rank_
def test_a_rank_that_dies_in_start_up_ends_the_start(healthy: Kernel, rank: int, number: int) -> None:
    for _ in range(5):
        victim, start = _restart_until_forked(healthy, rank)
        os.kill(victim, number)
        outcome = start.finish(HANG)
        if outcome.status != "ok":  # else it was up before we had come
            break
    assert outcome.ename == "SessionBroken", str(outcome)
    assert f"rank {rank}" in outcome.evalue and signal.Signals(number).name in outcome.evalue
    assert _says_what_to_type(outcome.evalue)
    await_end([victim])


def _restart_until_forked(kernel: Kernel, position: int) -> tuple[int, Execution]:
    """Restart, and the new process of a rank as soon as it is forked (-1: of the store)."""
    template = find(kernel.pid, "template")
    before = set(children(template))
    start = kernel.start("%distributed restart")
    deadline = time.monotonic() + HANG
    while len(new := [pid for pid in children(template) if pid not in before]) < position + 2:
        assert time.monotonic() < deadline
    return new[position + 1], start


# --- the template, the agent, the controller


@vital
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM], ids=["SIGKILL", "SIGTERM"])
def test_a_vital_process_that_dies_in_a_cell_is_named(healthy: Kernel, role: str, number: int) -> None:
    others, victim = _others_and(healthy, role)
    files = files_of_sessions() if role != "template" else set()
    cell = healthy.start(SLEEP)
    cell.wait_for("busy")
    os.kill(victim, number)
    outcome = cell.finish(HANG)
    assert outcome.ename == ("RankDied" if role == "template" else "SessionBroken"), str(outcome)
    _names(outcome.evalue, role, victim, number)
    assert _says_what_to_type(outcome.traceback)
    await_end(others)
    _gone(files)
    healthy.ok("%distributed restart", HANG)


@vital
def test_a_vital_process_that_dies_between_cells_is_named_by_the_next(healthy: Kernel, role: str) -> None:
    others, victim = _others_and(healthy, role)
    files = files_of_sessions() if role != "template" else set()
    os.kill(victim, signal.SIGKILL)
    await_end(others)
    if role == "template":
        wait_until(lambda: not _living(healthy), "the deaths to be known")
    outcome = _first_failure(healthy, "%%distributed\nkept")
    _names(outcome.evalue, role, victim, signal.SIGKILL)
    assert _says_what_to_type(outcome.evalue)
    _gone(files)
    healthy.ok("%distributed start -n 2" if role != "template" else "%distributed restart", HANG)


@vital
def test_a_vital_process_that_dies_in_start_up_ends_the_start(starting: Kernel, role: str) -> None:
    start = starting.start("%distributed restart")
    start.wait_for("importing torch")
    victim, files = await_role(starting.pid, role), files_of_sessions()
    others = [pid for pid in family(starting.pid) if pid != starting.pid]
    os.kill(victim, signal.SIGKILL)
    outcome = start.finish(HANG)
    assert outcome.ename == "SessionBroken", str(outcome)
    _names(outcome.evalue, role, victim, signal.SIGKILL)
    assert _says_what_to_type(outcome.evalue)
    if role == "template":  # the agent makes another, for the next start
        await_end([victim])
    else:
        await_end(others)
        _gone(files)
    starting.ok("%distributed restart", HANG)


def _others_and(kernel: Kernel, role: str) -> tuple[list[int], int]:
    """The processes that must end when the role's does, and the role's."""
    victim = find(kernel.pid, role)
    top = victim if role == "template" else find(kernel.pid, "controller")
    return family(top), victim


def _names(text: str, role: str, pid: int, number: int) -> None:
    assert role in text and f"pid {pid}" in text and signal.Signals(number).name in text, text


def _first_failure(kernel: Kernel, code: str) -> Outcome:
    """The cell's failure, also where it is sent before the notebook knows."""
    outcome = kernel.run(code, HANG)
    assert outcome.status == "error", str(outcome)
    return outcome


# --- the store


@signals
def test_a_store_that_dies_in_a_cell_is_named_and_the_cell_goes_on(healthy: Kernel, number: int) -> None:
    store = find_store(healthy)
    cell = healthy.start(
        "%%distributed\nimport torch, torch.distributed as dist\nprint('busy', flush=True)\n"
        f"while os.path.exists('/proc/{store}'): time.sleep(0.01)\n"
        "x = torch.ones(1); dist.all_reduce(x); print(int(x))"
    )
    cell.wait_for("busy")
    os.kill(store, number)
    outcome = cell.finish(HANG)
    assert outcome.status == "ok" and outcome.lines == both("busy", "2"), str(outcome)
    wait_until(lambda: "store" in _late(healthy, outcome), "the notice")
    _names(_late(healthy, outcome), "store", store, number)
    assert _says_what_to_type(_late(healthy, outcome))
    healthy.ok("%distributed restart", HANG)


def _late(kernel: Kernel, outcome: Outcome) -> str:
    with contextlib.suppress(Exception):
        while message := kernel.client.get_iopub_msg(timeout=0.05):
            if message["msg_type"] == "stream":
                outcome.stderr += message["content"]["text"]
    return outcome.stderr


def test_a_store_that_dies_between_cells_is_named_and_a_restart_brings_a_new_one(healthy: Kernel) -> None:
    store, outcome = find_store(healthy), Outcome()
    os.kill(store, signal.SIGKILL)
    wait_until(lambda: "store" in _late(healthy, outcome), "the notice")
    _names(outcome.stderr, "store", store, signal.SIGKILL)
    assert _says_what_to_type(outcome.stderr)
    healthy.ok("%distributed restart", HANG)
    healthy.ok("%%distributed\nimport torch.distributed as dist\ndist.new_group()")


def test_a_store_that_dies_in_start_up_ends_the_start(healthy: Kernel) -> None:
    for _ in range(5):
        victim, start = _restart_until_forked(healthy, -1)
        os.kill(victim, signal.SIGKILL)
        outcome = start.finish(HANG)
        if outcome.status != "ok":  # else all was up before we had come
            break
    assert outcome.ename == "SessionBroken" and "store" in outcome.evalue, str(outcome)
    assert "SIGKILL" in outcome.evalue and _says_what_to_type(outcome.evalue)
