"""Sessions whose client has crashed, restarted or left, and that another one takes over."""

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

from nbdist.visits import of_this_machine
from testbed.kernel import LIMIT, Kernel, both, kernel_with_ranks, wait_until
from tests.conftest import sharing
from tests.support.cells import gated
from tests.support.roles import alive, await_end, family, find

HANG = 30.0


def nbdist(*arguments: str, code: int = 0, typed: str = "") -> str:
    command = [sys.executable, "-m", "nbdist", *arguments]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60, input=typed)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


@contextlib.contextmanager
def client() -> Iterator[Kernel]:
    """A kernel that may attach."""
    with Kernel(NBDIST_PREWARM="0") as kernel:
        kernel.ok("%load_ext nbdist")
        yield kernel


@pytest.fixture(scope="module")
def other() -> Iterator[Kernel]:
    """The notebook that attaches. In the end the ranks are its own, and end with it."""
    with kernel_with_ranks(2, "--linger 60") as first, sharing(first):
        everyone = family(first.pid)
        with client() as kernel, sharing(kernel), sharing(psutil.Process(find(first.pid, "controller"))):
            first.ok("%distributed detach")
            yield kernel
            kernel.ok("%distributed attach --take")
    await_end(everyone)


@pytest.fixture
def notebook(other: Kernel) -> Iterator[Kernel]:
    """A notebook that has the ranks, which outlive it."""
    with client() as kernel:
        kernel.ok("%distributed attach")
        yield kernel
        for each in (kernel, other):
            if each.manager.is_alive():
                each.run("%distributed detach")


def kill(kernel: Kernel) -> None:
    """End a kernel, and wait until its session has noticed."""
    os.kill(kernel.pid, signal.SIGKILL)
    wait_until(lambda: [each for each in of_this_machine() if each.left == "crashed"], "the end to be seen")


def test_what_runs_when_the_kernel_dies_goes_on_in_another_with_all_that_it_has_printed(
    notebook: Kernel, other: Kernel, tmp_path: Path
) -> None:
    notebook.ok("%%distributed --setup\nkept = rank * 10")
    notebook.ok("%distributed plan ddp --precision bf16")
    notebook.start(gated(tmp_path, "print('done')")).wait_for_ranks(2, "begun")
    kill(notebook)
    attach = other.start("%distributed attach")
    outcome = attach.finish()
    assert outcome.status == "ok", str(outcome)
    assert "2 ranks on cpu; process group gloo" in outcome.stdout and "running on ranks 0-1" in outcome.stdout
    assert "the previous notebook's widgets" in outcome.stdout
    attach.wait_late_for_ranks(2, "begun")
    assert "gated" not in other.fails("%%distributed\n1", "SessionBusy").evalue
    (tmp_path / "go").touch()
    attach.wait_late_for_ranks(2, "done")
    other.ok("__import__('nbdist').get_session().cells[0].wait()")
    assert other.ok("%%distributed\nprint(kept)").lines == {0: ["0"], 1: ["10"]}
    assert "bf16" in other.ok("%distributed plan").stdout
    other.fails("%%distributed -r 1\nimport os; os._exit(3)", "RankDied")
    assert "it ran the setup cell" in other.ok("%distributed heal", HANG).stdout
    assert other.ok("%%distributed\nprint(kept)").lines == {0: ["0"], 1: ["10"]}


def test_what_has_ended_meanwhile_is_shown_with_its_error(notebook: Kernel, other: Kernel, tmp_path: Path) -> None:
    notebook.start(gated(tmp_path, "for i in range(99_999): print(i)\nif rank: 1 / 0")).wait_for("begun")
    kill(notebook)
    (tmp_path / "go").touch()
    wait_until(
        lambda: [each for each in of_this_machine() if each.description and not each.description.running], "it", LIMIT
    )
    shown = other.ok("%distributed attach")
    assert "ended while no notebook was attached" in shown.stdout
    assert "rank 1 raised ZeroDivisionError" in shown.stdout and "----> " in shown.stdout, shown.stdout[-2000:]
    assert "] 99998\n" in shown.stdout and "] 9998\n" not in shown.stdout  # of a rank that was slower perhaps
    assert "of earlier output are not shown here; `%distributed logs --cell" in shown.stderr
    assert other.value("__import__('nbdist').get_session().logs()[1].count('\\n')") == 100_000


def test_a_ctrl_c_while_ranks_are_taken_over_neither_loses_them_nor_the_cell_that_is_waited_for(
    notebook: Kernel, other: Kernel
) -> None:
    notebook.start("%%distributed\nimport time\nprint('begun', flush=True)\ntime.sleep(1000)").wait_for("begun")
    kill(notebook)
    at_once = (
        "import signal, sys\ndef at_once(frame, event, value):\n    if frame.f_code.co_name == 'adopt':\n"
        "        sys.setprofile(None)\n        signal.raise_signal(signal.SIGINT)\nsys.setprofile(at_once)\n"
    )
    other.fails(f"{at_once}import nbdist\nnbdist.attach()", "KeyboardInterrupt")
    other.fails(f"{at_once}get_ipython().run_line_magic('distributed', 'attach --wait')", "KeyboardInterrupt")
    assert other.ok("%%distributed\nprint('free')").lines == both("free")


def test_a_cell_that_goes_on_can_be_interrupted_and_waited_for(notebook: Kernel, other: Kernel) -> None:
    notebook.start("%%distributed\nimport time\nprint('begun', flush=True)\ntime.sleep(1000)").wait_for("begun")
    kill(notebook)
    attach = other.start("%distributed attach --wait")
    attach.wait_for_ranks(2, "begun")
    other.interrupt()
    assert "interrupted" in attach.finish().evalue
    assert other.ok("%%distributed\nprint('free')").lines == both("free")


def test_a_notebook_that_has_attached_may_decide_to_wait_later(notebook: Kernel, other: Kernel, tmp_path: Path) -> None:
    code = (
        f"import pathlib, time\nprint('begun', flush=True)\nwhile not pathlib.Path({str(tmp_path / 'go')!r}).exists():"
    )
    notebook.start(f"%%distributed\n{code} time.sleep(0.05)").wait_for("begun")
    kill(notebook)
    other.ok("%distributed attach")
    cell = other.start("print('here')\n%distributed attach --wait")
    cell.wait_for("here")
    (tmp_path / "go").touch()
    assert cell.finish().status == "ok", str(cell.outcome)
    assert other.value("__import__('nbdist').get_session().cells[0].done")
    assert "already has session" in other.fails("%distributed attach", "UsageError").evalue


def test_a_ctrl_c_just_before_the_wait_for_a_cell_that_goes_on_is_not_missed(notebook: Kernel, other: Kernel) -> None:
    """Where another thread gets the signal, it ends no wait of the main one: as if it had come just before."""
    notebook.start("%%distributed\nimport time\nprint('begun', flush=True)\ntime.sleep(1000)").wait_for("begun")
    kill(notebook)
    elsewhere = (
        "import signal, sys, threading\nmain = threading.main_thread().ident\ndef at_the_wait():\n"
        "    frame = sys._current_frames()[main]\n    names = set()\n"
        "    while frame: names.add(frame.f_code.co_name); frame = frame.f_back\n"
        "    return {'wait_all', 'wait'} <= names\n"
        "def interrupt():\n    while not at_the_wait(): pass\n"
        "    signal.pthread_kill(threading.get_ident(), signal.SIGINT)\n"
        "threading.Thread(target=interrupt).start()\n"
    )
    attach = "get_ipython().run_line_magic('distributed', 'attach --wait')"
    assert "interrupted" in other.fails(elsewhere + attach, "KeyboardInterrupt", HANG).evalue


def test_a_session_that_has_a_client_is_taken_only_from_it_on_request(notebook: Kernel, other: Kernel) -> None:
    refused = other.fails("%distributed attach", "UsageError").evalue
    assert f"pid {notebook.pid}" in refused and "--take" in refused
    cell = notebook.start("%%distributed\nimport time\nprint('begun', flush=True)\ntime.sleep(1000)")
    cell.wait_for("begun")
    other.ok("%distributed attach --take")
    outcome = cell.finish()
    assert f"was taken over by pid {other.pid}" in outcome.evalue, str(outcome)
    for line in ("%%distributed\n1", "%distributed status"):
        assert "`%distributed attach --take` takes it back" in notebook.fails(line, "SessionClosed").evalue
    other.ok("%distributed interrupt")
    other.fails("__import__('nbdist').get_session().cells[0].wait()", "KeyboardInterrupt")
    assert notebook.ok("%distributed attach --take").status == "ok"
    assert notebook.ok("%%distributed\nprint(rank)").lines == {0: ["0"], 1: ["1"]}
    assert "taken over" in other.fails("%%distributed\n1", "SessionClosed").evalue


def test_a_notebook_leaves_its_ranks_and_comes_back(notebook: Kernel) -> None:
    notebook.ok("%%distributed\nkept = rank")
    left = notebook.ok("%distributed detach --linger 40s").stdout
    assert "left running for 40 s" in left
    name = left.split("attach ")[1].split("`")[0]
    assert "is detached from its session" in notebook.fails("%%distributed\n1", "SessionClosed").evalue
    assert f"{name}  {notebook.pid}" in nbdist("ls") and "detached, ends in" in nbdist("ls")
    assert "give the name of one" not in notebook.ok(f"%distributed attach {name[:5]}").stdout
    assert notebook.ok("%%distributed\nprint(kept)").lines == {0: ["0"], 1: ["1"]}


def test_a_restarted_kernel_finds_its_ranks(notebook: Kernel) -> None:
    notebook.ok("%%distributed\nkept = rank")
    _restart(notebook, now=False)
    assert "restarted, ends in" in nbdist("ls")
    notebook.ok("%distributed attach")
    assert notebook.ok("%%distributed\nprint(kept)").lines == {0: ["0"], 1: ["1"]}


def test_the_panel_of_another_notebook_shows_what_a_session_without_a_client_holds(
    notebook: Kernel, other: Kernel
) -> None:
    with client() as third:
        assert "without" not in str(third.ok("%distributed panel").plain)
        kill(notebook)
        show = "panel = __import__('nbdist').Panel(rate=0.25)\npanel"
        third.ok(show)
        wait_until(lambda: "(crashed, ends in " in str(third.ok("panel").plain), "what is held")
        assert ") holds 2 ranks, " in str(third.ok("panel").plain)
    other.ok("%distributed attach")


def test_a_script_attaches_and_leaves_the_ranks_as_they_are(notebook: Kernel, other: Kernel) -> None:
    notebook.ok("%%distributed\nkept = rank")
    notebook.ok("%distributed detach")
    ranks = "import nbdist; session = nbdist.attach(); print(session.pull('kept'))"
    done = subprocess.run([sys.executable, "-c", ranks], check=True, capture_output=True, text=True, timeout=60)
    assert done.stdout.endswith("[0, 1]\n"), done.stdout + done.stderr
    other.ok("%distributed attach")
    assert all(map(alive, other.rank_pids()))


def test_a_prompt_in_a_terminal_runs_cells_on_the_ranks_and_leaves_them(notebook: Kernel, other: Kernel) -> None:
    notebook.ok("%%distributed\nkept = rank")
    assert f"belongs to pid {notebook.pid}" in nbdist("attach", code=2)
    shown = nbdist("attach", "--take", typed="print(kept, 'typed')\n%distributed status\n1 / 0\nexit\n")
    assert "[0] 0 typed" in shown and "[1] 1 typed" in shown and "generation" in shown and "ZeroDivisionError" in shown
    assert "keep running for 60 s: `nbdist attach" in shown
    assert "taken over" in notebook.fails("%%distributed\n1", "SessionClosed").evalue
    other.ok("%distributed attach")
    assert other.ok("%%distributed\nprint(kept)").lines == {0: ["0"], 1: ["1"]}


def test_a_start_names_what_a_crash_has_left_and_ends_what_a_restart_has_left_and_a_shutdown_leaves_nothing() -> None:
    with kernel_with_ranks(1, "--linger 60", NBDIST_PREWARM="0") as kernel:
        _restart(kernel, now=True)
        refused = kernel.fails("%distributed start -n 1", "UsageError").evalue
        assert "the previous session of this notebook holds 1 rank, " in refused and "--replace" in refused
        kernel.ok("%distributed attach")
        ranks = kernel.rank_pids()
        _restart(kernel, now=False)
        assert "was stopped" in kernel.ok("%distributed start -n 1 --linger 60", HANG).stdout
        await_end(ranks)
        everyone = family(kernel.pid)
        stubborn = "import time\nprint('begun', flush=True)\nwhile True:\n    try: time.sleep(60)\n    except: pass"
        kernel.start(stubborn).wait_for("begun")
        kernel.manager.shutdown_wait_time = 0.5  # then it is killed
    await_end(everyone)


def _restart(kernel: Kernel, *, now: bool) -> None:
    """As by the user, or as Jupyter does when a kernel has crashed (`now`)."""
    kernel.manager.restart_kernel(now=now)
    kernel.client.wait_for_ready(timeout=HANG)
    kernel.pid = kernel.manager.provisioner.process.pid  # type: ignore[union-attr]
    kernel.ok("%load_ext nbdist")
