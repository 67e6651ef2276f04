from __future__ import annotations

from pathlib import Path

import pytest

from testbed.kernel import Kernel, wait_until


def start(kernel: Kernel, code: str, flags: str = "") -> None:
    """Begin a background cell; its handle is `handle`."""
    kernel.ok(f"%%distributed --background {flags}\n{code}")
    kernel.ok("handle = _")


def held_by(path: Path) -> str:
    """Code that goes on when a file appears."""
    return f"import pathlib, time\nwhile not pathlib.Path({str(path)!r}).exists(): time.sleep(0.01)\n"


def test_a_background_cell_returns_at_once_with_a_handle(ranks: Kernel, tmp_path: Path) -> None:
    start(ranks, held_by(tmp_path / "go") + "rank + 1")
    assert ranks.value("handle.done") is False
    (tmp_path / "go").touch()
    assert ranks.value("[result.result for result in handle.wait(30).values()]") == ["1", "2"]
    assert ranks.value("handle.done") is True


def test_the_notebook_goes_on_meanwhile(ranks: Kernel, tmp_path: Path) -> None:
    start(ranks, held_by(tmp_path / "go"), "-r 0")
    assert ranks.ok("1 + 1").plain == ["2"]
    assert ranks.ok("%%rank 1\nrank").plain == ["[1] 1"]
    (tmp_path / "go").touch()
    ranks.ok("handle.wait(30);")


def test_a_busy_rank_takes_no_second_cell_and_says_what_it_runs(ranks: Kernel, tmp_path: Path) -> None:
    start(ranks, held_by(tmp_path / "go"), "-r 1")
    outcome = ranks.fails("%%distributed\nprint('must not run')", "SessionBusy")
    assert "rank 1 is still running cell" in outcome.evalue and "%distributed interrupt" in outcome.evalue
    assert outcome.stdout == ""
    (tmp_path / "go").touch()
    ranks.ok("handle.wait(30);")
    assert ranks.ok("%%distributed\nrank").plain == ["[0] 0\n[1] 1"]


def test_output_so_far_is_there_while_it_runs(ranks: Kernel, tmp_path: Path) -> None:
    start(ranks, "print('begun')\n" + held_by(tmp_path / "go") + "print('ended')")
    wait_until(lambda: ranks.value("handle.output[1].stdout") == "begun\n", "the first line")
    (tmp_path / "go").touch()
    assert ranks.value("handle.wait(30)[1].stdout") == "begun\nended\n"


def test_wait_with_a_limit_raises_and_the_cell_goes_on(ranks: Kernel, tmp_path: Path) -> None:
    start(ranks, held_by(tmp_path / "go") + "'done'")
    outcome = ranks.fails("handle.wait(0.05)", "RankTimeout")
    assert "still running after 0.05 s" in outcome.evalue
    (tmp_path / "go").touch()
    assert ranks.value("handle.wait(30)[0].result") == "'done'"


def test_interrupt_stops_it_and_keeps_variables(ranks: Kernel) -> None:
    start(ranks, "kept = rank\nimport time\nprint('asleep')\ntime.sleep(60)")
    wait_until(lambda: "asleep" in ranks.value("handle.output[0].stdout + handle.output[1].stdout"), "the sleep")
    ranks.ok("handle.interrupt()")
    assert "interrupted" in ranks.fails("handle.wait(30)", "KeyboardInterrupt").evalue
    assert ranks.ok("%%distributed\nkept").plain == ["[0] 0\n[1] 1"]


def test_a_failure_is_shown_and_raised_by_wait(ranks: Kernel) -> None:
    start(ranks, "1/0")
    outcome = ranks.fails("handle.wait(30)", "RankError")
    assert "ZeroDivisionError" in outcome.evalue and "line 2" in outcome.traceback
    assert "failed" in ranks.ok("handle").plain[0]
    assert ranks.value("handle.output[0].error.name") == "ZeroDivisionError"


def test_a_timeout_counts_in_the_background_too(ranks: Kernel) -> None:
    start(ranks, "import time\ntime.sleep(60)", "--timeout 0.2")
    assert "not done after 0.2 s" in ranks.fails("handle.wait(30)", "RankTimeout").evalue


def test_a_captured_background_cell_fills_the_capture(ranks: Kernel) -> None:
    ranks.ok("%%distributed --background --capture kept\nprint('quiet')\nrank")
    ranks.ok("handle = _\nhandle.wait(30);")
    assert ranks.value("(kept[1].stdout, kept[1].result)") == ("quiet\n", "1")


def test_two_background_cells_run_side_by_side(ranks: Kernel, tmp_path: Path) -> None:
    start(ranks, held_by(tmp_path / "go") + "'first'", "-r 0")
    ranks.ok("first = handle")
    start(ranks, held_by(tmp_path / "go") + "'second'", "-r 1")
    (tmp_path / "go").touch()
    assert ranks.value("(first.wait(30)[0].result, handle.wait(30)[1].result)") == ("'first'", "'second'")


@pytest.mark.parametrize("code", ["handle", "str(handle)"])
def test_a_handle_says_what_it_is(ranks: Kernel, code: str) -> None:
    start(ranks, "1")
    ranks.ok("handle.wait(30);")
    assert "in the background on ranks 0-1: done" in ranks.ok(code).plain[0]
