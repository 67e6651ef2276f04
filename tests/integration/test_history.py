"""`nbdist.history()` in a real notebook: cells that ran on ranks, and looks while somebody watches."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from testbed.kernel import Kernel, wait_until


@pytest.fixture
def notebook(ranks: Kernel) -> Iterator[Kernel]:
    """The shared kernel, with nothing recorded yet."""
    ranks.ok("import nbdist\nnbdist.history().stop()\nnbdist.history().clear()")
    yield ranks
    ranks.ok("nbdist.history().stop()")


def cells(kernel: Kernel, *columns: str) -> list[tuple[Any, ...]]:
    frame = f"nbdist.history().cells[{list(columns)}]"
    return [tuple(row) for row in kernel.value(f"{frame}.values.tolist()")]


def looks(path: Path) -> list[dict[str, Any]]:
    lines = path.read_text().splitlines() if path.exists() else []
    return [row for row in map(json.loads, lines) if row["table"] == "samples"]


def test_each_cell_leaves_a_row_with_what_has_become_of_it(notebook: Kernel) -> None:
    notebook.run("%%distributed\nx = 1")
    notebook.run("%%distributed -r 1\n\n# second\n1 / 0")
    assert cells(notebook, "ranks", "status", "code") == [("0-1", "ok", "x = 1"), ("1", "error", "# second")]
    numbers = [number for (number,) in cells(notebook, "cell")]
    assert numbers == sorted(set(numbers)) and min(numbers) > 0


def test_a_cell_that_is_interrupted_says_so(notebook: Kernel) -> None:
    cell = notebook.start("%%distributed\nimport time\nprint('there')\ntime.sleep(600)")
    cell.wait_for("there")
    notebook.interrupt()
    cell.finish()
    assert cells(notebook, "status") == [("interrupted",)]


def test_time_is_wall_time_from_the_cells_beginning(notebook: Kernel) -> None:
    notebook.ok("import time\nbegan = time.time()")
    notebook.ok("%%distributed\nimport time; time.sleep(0.2)")
    ((at, seconds),) = cells(notebook, "at", "seconds")
    assert 0.2 <= seconds < 60
    assert 0 <= at - notebook.value("began") < 60


def test_calls_are_kept_and_values_that_only_move_are_not(notebook: Kernel) -> None:
    notebook.ok("session = nbdist.get_session()\ndef f(): return 1\nsession.push({'y': 1})\nsession.call(f)")
    assert cells(notebook, "kind", "code") == [("call", "f")]


def test_what_nbdist_has_ranks_do_for_itself_is_not_kept(notebook: Kernel) -> None:
    notebook.ok("%distributed tflops on")
    try:
        notebook.ok("%%distributed\npass")
        assert cells(notebook, "kind") == [("cell",)]
    finally:
        notebook.ok("%distributed tflops off")


def test_background_cells_are_kept_when_they_end(notebook: Kernel) -> None:
    notebook.ok("handle = nbdist.get_session().run_in_background('z = 1')\nhandle.wait()")
    assert cells(notebook, "status", "code") == [("ok", "z = 1")]


def test_while_nobody_watches_there_are_cells_and_no_looks(notebook: Kernel) -> None:
    notebook.ok("%%distributed\nx = 1")
    assert notebook.value("len(nbdist.history().samples)") == 0


def test_what_others_watch_is_kept(notebook: Kernel) -> None:
    notebook.ok(
        "import threading\nfrom nbdist.client.costs.monitor import Monitor\nthere = threading.Event()\n"
        "leave = Monitor.of(nbdist.get_session()).subscribe(lambda sample: there.set())\n"
        "there.wait(20)\nleave()"
    )
    assert set(notebook.value("nbdist.history().samples['rank'].tolist()")) == {0, 1}


def test_a_file_grows_while_a_cell_runs(notebook: Kernel, tmp_path: Path) -> None:
    path, gate = tmp_path / "run.jsonl", tmp_path / "open"
    notebook.ok(f"nbdist.history({str(path)!r}, rate=0.25)")
    cell = notebook.start(f"%%distributed\nimport os, time\nwhile not os.path.exists({str(gate)!r}): time.sleep(0.01)")
    wait_until(lambda: [row for row in looks(path) if row["state"] == "busy"], "a look at a rank that is busy")
    gate.touch()
    cell.finish()
    (last,) = [json.loads(line) for line in path.read_text().splitlines() if '"table":"cells"' in line]
    assert (last["ranks"], last["status"]) == ("0-1", "ok")


def test_without_a_session_the_notebooks_own_cells_are_kept(kernel: Kernel) -> None:
    kernel.ok("%load_ext nbdist\nimport nbdist")
    kernel.ok("\nx = 1")
    kernel.ok("get_ipython().run_cell('y = 2')")
    kernel.fails("1 / 0", "ZeroDivisionError")
    kernel.fails("1 /", "SyntaxError")
    rows = cells(kernel, "kind", "ranks", "status", "code")
    assert rows[0] == ("cell", "-1", "ok", "x = 1")
    assert [(status, code) for _, _, status, code in rows[1:]] == [
        ("ok", "get_ipython().run_cell('y = 2')"),
        ("error", "1 / 0"),
        ("error", "1 /"),
    ]
    (number, *others) = [number for (number,) in cells(kernel, "cell")]
    assert others == [number + 1, number + 2, number + 3] and number == kernel.value(
        "[each.strip() for each in In].index('x = 1')"
    )
    kernel.ok("%distributed start -n 1")
    kernel.ok("z = 3")
    assert len(cells(kernel, "cell")) == 4


def test_recording_before_a_session_turns_to_its_ranks_with_their_first_cell(kernel: Kernel, tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    kernel.ok(f"%load_ext nbdist\nimport nbdist\nnbdist.history({str(path)!r}, rate=0.25)")
    wait_until(lambda: {row["rank"] for row in looks(path)} == {-1}, "a look at the notebook itself")
    kernel.ok("%distributed start -n 1")
    kernel.ok("%%distributed\npass")
    wait_until(lambda: {row["rank"] for row in looks(path)} == {-1, 0}, "a look at the rank")


def test_a_cell_of_a_rank_that_dies_says_so(own_ranks: Kernel) -> None:
    own_ranks.ok("import nbdist")
    own_ranks.run("%%distributed\nimport os, signal\nif rank == 1: os.kill(os.getpid(), signal.SIGKILL)")
    assert cells(own_ranks, "status") == [("died",)]


def test_a_kernel_that_is_killed_leaves_whole_lines(own_ranks: Kernel, tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    own_ranks.ok(f"import nbdist\nnbdist.history({str(path)!r}, rate=0.25)")
    wait_until(lambda: looks(path), "a row")
    os.kill(own_ranks.pid, signal.SIGKILL)
    assert path.read_text().endswith("}\n") and looks(path)
