"""`%distributed logs`: all that a cell printed on ranks, whole and in order, whatever page and disk take."""

from __future__ import annotations

import os
import re
import resource
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from testbed.kernel import Kernel, kernel_with_ranks, wait_until
from tests.support.cells import number_of
from tests.support.roles import find


def test_the_newest_cell_is_shown_rank_by_rank(ranks: Kernel) -> None:
    ranks.ok("%%distributed\nprint('one')\nprint('two', rank)")
    assert ranks.ok("%distributed logs").stdout == "[0] one\n[0] two 0\n[1] one\n[1] two 1\n"


def test_any_cell_is_found_by_its_number(ranks: Kernel) -> None:
    old = ranks.ok("%%distributed\nprint('old')")
    ranks.ok("%%distributed\nprint('new')")
    assert ranks.ok(f"%distributed logs --cell {number_of(old)} -r 1").stdout == "[1] old\n"


def test_everything_that_a_local_cell_ran_is_one_log(ranks: Kernel) -> None:
    ranks.ok("session = __import__('nbdist').get_session()\nfor i in range(3): session.run(f'print({i})', ranks=[0])")
    assert ranks.ok("%distributed logs -r 0").stdout == "[0] 0\n[0] 1\n[0] 2\n"


def test_ranks_are_chosen(ranks: Kernel) -> None:
    ranks.ok("%%distributed\nprint('mine', rank)")
    assert ranks.ok("%distributed logs -r 1").stdout == "[1] mine 1\n"


def test_only_the_last_lines_are_shown_when_asked(ranks: Kernel) -> None:
    ranks.ok("%%distributed\nfor i in range(100): print(i)")
    assert ranks.ok("%distributed logs --tail 2").stdout == "[0] 98\n[0] 99\n[1] 98\n[1] 99\n"


def test_stdout_and_stderr_stand_in_their_order(ranks: Kernel, tmp_path: Path) -> None:
    lines = [f"{stream} {i}" for i in range(3) for stream in ("out", "err")]
    cell = ranks.start(
        f"%%distributed -r 0\nimport os, sys, time\nfor line in {lines}:\n"
        "    print(line, file=sys.stdout if 'out' in line else sys.stderr)\n"
        f"    while not os.path.exists(os.path.join({str(tmp_path)!r}, line)): time.sleep(0.005)"
    )
    for line in lines:  # the order of what is on its way at the same time is anybody's guess
        cell.wait_for(f"[0] {line}\n")
        (tmp_path / line).touch()
    cell.finish()
    assert ranks.ok("%distributed logs -r 0").stdout == "".join(f"[0] {line}\n" for line in lines)


def test_a_saved_log_is_whole_and_exact(ranks: Kernel, tmp_path: Path) -> None:
    ranks.ok("%%distributed --quiet\nfor i in range(200_000): print(rank, i, 'é' * 40)", 120)
    ranks.ok(f"%distributed logs --save {tmp_path / 'log'}", 120)
    lines = [f"[{rank}] {rank} {i} {'é' * 40}" for rank in (0, 1) for i in range(200_000)]
    assert (tmp_path / "log").read_text().split("\n")[:-1] == lines


def test_a_saved_log_keeps_carriage_returns_and_unusual_separators(ranks: Kernel, tmp_path: Path) -> None:
    ranks.ok("%%distributed -r 0\nprint('a\\rb\\x0bc\\x1cd\\u2028e')")
    ranks.ok(f"%distributed logs -r 0 --save {tmp_path / 'log'}")
    assert (tmp_path / "log").read_bytes().decode() == "[0] a\rb\x0bc\x1cd\u2028e\n"


def test_a_log_too_long_for_a_page_is_refused_with_what_to_type(ranks: Kernel) -> None:
    ranks.ok("%%distributed --quiet\nfor i in range(10): print('x' * 999_999)")
    outcome = ranks.fails("%distributed logs", "UsageError")
    assert "--save" in outcome.traceback and "--tail" in outcome.traceback


def test_a_file_that_cannot_be_written_is_said(ranks: Kernel) -> None:
    ranks.ok("%%distributed\nprint('x')")
    assert "No such file" in ranks.fails("%distributed logs --save /nowhere/log", "UsageError").traceback


def test_a_cell_that_printed_nothing_is_said(ranks: Kernel) -> None:
    quiet = ranks.ok("%%distributed\npass")
    outcome = ranks.fails(f"%distributed logs --cell {number_of(quiet)}", "UsageError")
    assert "printed nothing" in outcome.traceback


@pytest.fixture
def full_disk(own_ranks: Kernel) -> Iterator[Kernel]:
    """A kernel whose controller can write files of 100 kB at most."""
    controller = find(own_ranks.pid, "controller")
    before = resource.prlimit(controller, resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))
    yield own_ranks
    resource.prlimit(controller, resource.RLIMIT_FSIZE, before)  # other tests may get this kernel


def test_with_no_space_left_cells_run_on_show_their_output_and_say_so_once(full_disk: Kernel) -> None:
    cell = full_disk.start("%%distributed\nfor i in range(20_000): print(rank, 'line', i)")
    outcome = cell.finish()
    assert len(outcome.stdout.splitlines()) == 40_000
    cell.wait_late("the output log can't keep")
    assert outcome.stderr.count("the output log can't keep") == 1
    assert "next" in full_disk.ok("%%distributed\nprint('next')").stdout
    assert full_disk.ok("%distributed logs -r 0").stdout == "[0] next\n"
    before = full_disk.ok(f"%distributed logs --cell {number_of(outcome)} --tail 1")
    assert re.search(r"KiB more that cell \d+ printed could not be written to the log", before.stderr)


def test_without_a_temporary_folder_cells_run_and_show_their_output(tmp_path: Path) -> None:
    folder = tmp_path / "gone"
    folder.mkdir()
    with Kernel(TMPDIR=str(folder)) as kernel:
        kernel.ok("%load_ext nbdist")
        kernel.ok("%distributed start -n 2")
        shutil.rmtree(folder)
        cell = kernel.start("%%distributed\nprint('well')")
        outcome = cell.finish()
        assert "well" in outcome.stdout
        cell.wait_late("the output log can't keep")
        assert outcome.stderr.count("the output log can't keep") == 1


def test_a_closed_session_leaves_no_log(tmp_path: Path) -> None:
    with Kernel(TMPDIR=str(tmp_path)) as kernel:
        kernel.ok("%load_ext nbdist\n%distributed start -n 1")
        kernel.ok("%%distributed\nprint('secret')")
        assert list(tmp_path.glob("nbdist-*"))
    assert not list(tmp_path.glob("nbdist-*"))


SESSION = "session = __import__('nbdist').get_session()\n"


def test_a_new_session_has_nothing_of_the_last_one(notebook: Kernel) -> None:
    notebook.ok("%load_ext nbdist\n%distributed start -n 2")
    notebook.ok("%%distributed\nprint('old')")
    notebook.ok("%distributed stop\n%distributed start -n 2")
    assert "no cell has printed" in notebook.fails("%distributed logs", "UsageError").evalue
    notebook.ok("%%distributed\nprint('new')")
    assert notebook.ok("%distributed logs").stdout == "[0] new\n[1] new\n"
    notebook.ok("%distributed stop")


def test_a_session_that_has_stopped_leaves_nothing_on_the_disk(tmp_path: Path) -> None:
    with Kernel(TMPDIR=str(tmp_path)) as kernel:
        kernel.ok("%load_ext nbdist\n%distributed start -n 1")
        kernel.ok("%%distributed\nprint('secret')")
        (folder,) = tmp_path.glob("nbdist-*")
        kernel.ok("%distributed stop")
        wait_until(lambda: not any(folder.iterdir()), "the log to be empty")


def test_a_launch_leaves_nothing_in_the_log_of_the_next_session(notebook: Kernel) -> None:
    notebook.ok("%load_ext nbdist\nfrom nbdist import notebook_launcher")
    notebook.ok("notebook_launcher(lambda: print('launched'), num_processes=2)")
    notebook.ok("%distributed start -n 2")
    assert "no cell has printed" in notebook.fails("%distributed logs", "UsageError").evalue
    notebook.ok("%distributed stop")


def test_after_a_restart_the_log_has_what_was_printed_before(own_ranks: Kernel) -> None:
    before = own_ranks.ok("%%distributed\nprint('before')")
    own_ranks.ok("%distributed restart")
    own_ranks.ok("%%distributed\nprint('after')")
    assert own_ranks.ok("%distributed logs").stdout == "[0] after\n[1] after\n"
    assert own_ranks.ok(f"%distributed logs --cell {number_of(before)}").stdout == "[0] before\n[1] before\n"


def test_of_several_runs_in_one_cell_each_has_a_log_of_its_own_also_across_a_restart(own_ranks: Kernel) -> None:
    own_ranks.ok(
        f"{SESSION}first = session.run('print(1)')\nsession.restart()\nsecond = session.run('print(2)')\n"
        "texts = [session.logs(cell=result) for result in (first, second)]"
    )
    assert own_ranks.value("texts") == [{0: "1\n", 1: "1\n"}, {0: "2\n", 1: "2\n"}]


@pytest.fixture
def hung_disk(tmp_path: Path) -> Iterator[Kernel]:
    """A kernel whose controller hangs as soon as it writes to the log: its next file is a pipe that nobody reads."""
    with kernel_with_ranks(2, TMPDIR=str(tmp_path)) as kernel:
        kernel.ok("%%distributed -r 0\nprint('so that there is a log')\n")
        kernel.ok("%distributed logs")
        (file,) = tmp_path.glob("nbdist-*/*")
        pipe = file.with_name(str(file.stat().st_size))
        os.mkfifo(pipe)
        file.unlink()
        yield kernel
        end = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)  # the disk is back
    os.close(end)


def test_a_disk_that_hangs_delays_nothing_but_the_log(hung_disk: Kernel) -> None:
    assert len(hung_disk.ok("%%distributed\nfor i in range(20_000): print(i)").stdout.splitlines()) >= 20_000
    assert "idle" in hung_disk.ok("%distributed status").stdout
    assert "its disk may hang" in hung_disk.fails("%distributed logs", "SessionError").evalue
    cell = hung_disk.start("%%distributed\nimport time\nprint('busy')\ntime.sleep(60)")
    cell.wait_for("busy")
    hung_disk.interrupt()
    assert cell.finish(20.0).ename == "KeyboardInterrupt"
    hung_disk.ok("%distributed restart")
