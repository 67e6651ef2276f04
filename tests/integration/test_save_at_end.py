"""`%distributed start --save DIR`: an announced end stops ranks after the same step, and saves the session."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from testbed.kernel import Execution, Kernel, lines_by_rank, wait_until
from tests.support.roles import alive, find
from tests.support.spare import without_session

HANG = 60.0
SETUP = """%%distributed --setup
import time, torch, nbdist
torch.manual_seed(0)
net = torch.nn.Linear(4, 1)
model, optimizer = nbdist.prepare(net, torch.optim.AdamW(net.parameters(), 1e-2))
step = 0
"""
TRAIN = """%%distributed
def train(steps):
    global step
    while step < steps:
        optimizer.zero_grad()
        model(torch.full((2, 4), float(rank + 1 + step % 7))).square().mean().backward()
        optimizer.step()
        step += 1
        if step == 1: print('trains', flush=True)
        time.sleep(0.002)
"""
RESULT = "%%distributed\nprint(*[p.double().sum().item().hex() for p in model.parameters()])"


@pytest.fixture
def empty(notebook: Kernel, tmp_path: Path) -> Iterator[Kernel]:
    """The module's kernel, without a session before and after, in a new folder."""
    with without_session(notebook, tmp_path) as kernel:
        yield kernel


def training(kernel: Kernel, flags: str = "") -> Execution:
    """A cell that trains without an end."""
    kernel.ok(f"%distributed start -n 2 --save saves {flags}", HANG)
    kernel.ok(SETUP)
    kernel.ok(TRAIN)
    cell = kernel.start("%%distributed\ntrain(10**9)")
    cell.wait_for_ranks(2, "trains")
    return cell


def steps_saved(folder: Path) -> int:
    return int(json.loads((folder / "saves/save-1/checkpoint.json").read_text())["steps"])


def result_from(kernel: Kernel, steps: int) -> dict[int, list[str]]:
    """What a new session has that goes on from the save up to this step."""
    kernel.ok("%distributed start --from saves --replace", HANG)
    kernel.ok(f"%%distributed\ntrain({steps})", HANG)
    return lines_by_rank(kernel.ok(RESULT).stdout)


def test_a_run_that_a_warning_stopped_and_that_goes_on_equals_one_that_never_stopped(
    empty: Kernel, tmp_path: Path
) -> None:
    cell = training(empty)
    os.kill(find(empty.pid, "controller"), signal.SIGUSR1)
    cell.wait_late("starts a session from it", HANG)
    text = str(cell.outcome)
    assert "The ranks stop, and the session is saved to saves." in text and "KeyboardInterrupt" in text
    steps = steps_saved(tmp_path) + 5
    resumed = result_from(empty, steps)
    empty.ok("%distributed start -n 2 --replace", HANG)
    empty.ok(SETUP)
    empty.ok(TRAIN)
    empty.ok(f"%%distributed\ntrain({steps})", HANG)
    assert resumed == lines_by_rank(empty.ok(RESULT).stdout)


def test_after_sigterm_the_session_is_saved_before_it_ends(empty: Kernel, tmp_path: Path) -> None:
    cell = training(empty, "--end-grace 8")
    pid = find(empty.pid, "controller")
    os.kill(pid, signal.SIGTERM)
    cell.wait_late("starts a session from it", HANG)
    wait_until(lambda: not alive(pid), "the end", 30)
    assert result_from(empty, steps_saved(tmp_path) + 2).keys() == {0, 1}


def test_an_end_by_the_clock_is_announced_and_the_session_saved_shortly_before(empty: Kernel, tmp_path: Path) -> None:
    at = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(time.time() + 20))
    cell = training(empty, f"--until {at} --warn 16s")
    cell.wait_late("starts a session from it", HANG)
    assert "Two minutes before it, the ranks stop, and the session is saved to saves." in str(cell.outcome)
    assert steps_saved(tmp_path) > 0


def test_idle_ranks_are_saved_before_they_end(empty: Kernel, tmp_path: Path) -> None:
    empty.ok("%distributed start -n 2 --save saves --idle 4", HANG)
    empty.ok("%%distributed\nkept = rank")
    wait_until((tmp_path / "saves/save-1").exists, "the save", 30)
    wait_until(lambda: empty.value("nbdist.client.session.current.living_session() is None"), "the end", 30)
    empty.ok("%distributed start --from saves", HANG)
    assert lines_by_rank(empty.ok("%%distributed\nprint(kept)").stdout) == {0: ["0"], 1: ["1"]}


def test_a_save_that_fails_says_so_and_the_ranks_go_on(empty: Kernel, tmp_path: Path) -> None:
    (tmp_path / "saves").write_text("in the way")
    cell = training(empty)
    os.kill(find(empty.pid, "controller"), signal.SIGUSR1)
    cell.wait_late("the session was not saved before its end", HANG)
    assert lines_by_rank(empty.ok("%%distributed\nprint(step > 0)").stdout) == {0: ["True"], 1: ["True"]}


def test_two_signals_at_once_save_one_after_the_other(empty: Kernel, tmp_path: Path) -> None:
    cell = training(empty, "--end-grace 20")
    pid = find(empty.pid, "controller")
    os.kill(pid, signal.SIGUSR1)
    os.kill(pid, signal.SIGTERM)
    cell.wait_late("saved saves/save-2", HANG)
    assert "not saved" not in str(cell.outcome)
    wait_until(lambda: not alive(pid), "the end", 40)
    assert (tmp_path / "saves/save-1").exists()


def test_idle_ranks_that_can_not_be_saved_do_not_end(empty: Kernel, tmp_path: Path) -> None:
    (tmp_path / "saves").write_text("in the way")
    empty.ok("%distributed start -n 2 --save saves --idle 2", HANG)
    cell = empty.start("%%distributed\nkept = rank")
    cell.finish()
    cell.wait_late("the session was not saved before its end", HANG)
    assert lines_by_rank(empty.ok("%%distributed\nprint(kept)").stdout) == {0: ["0"], 1: ["1"]}
