from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import nbclient
import nbformat
import papermill
import pexpect
import pytest
from nbclient.exceptions import CellExecutionError
from papermill.exceptions import PapermillExecutionError

from testbed.kernel import Kernel, both, lines_by_rank

BEFORE = ["%load_ext nbdist\n%distributed start -n 2", "%%distributed\nprint('seen'); rank"]
FAILING = "%%distributed\nprint('last words'); raise ValueError('why')"
AFTER = "print('must not run')"


def notebook(*cells: str) -> nbformat.NotebookNode:
    new = nbformat.v4
    return new.new_notebook(cells=[new.new_code_cell(cell) for cell in cells])


def printed(cell: nbformat.NotebookNode) -> dict[int, list[str]]:
    """What each rank printed."""
    return lines_by_rank("".join(output.get("text", "") for output in cell.outputs))


def values(cell: nbformat.NotebookNode) -> list[str]:
    """The text of each of a cell's displays."""
    return [output["data"]["text/plain"] for output in cell.outputs if "data" in output]


def both_show(text: str, output: str) -> bool:
    """Whether both ranks show this in a terminal, together or one after the other."""
    return f"[0-1] {text}" in output or all(f"[{rank}] {text}" in output for rank in (0, 1))


def test_nbclient_shows_the_output_of_ranks() -> None:
    executed = nbclient.NotebookClient(notebook(*BEFORE), timeout=60, kernel_name="python3").execute()
    assert printed(executed.cells[1]) == both("seen")
    assert values(executed.cells[1]) == ["[0] 0\n[1] 1"]


def test_nbclient_stops_at_the_failing_cell_and_keeps_both_outputs() -> None:
    running = notebook(*BEFORE, FAILING, AFTER)
    client = nbclient.NotebookClient(running, timeout=60, kernel_name="python3")
    with pytest.raises(CellExecutionError, match="ValueError: why"):
        client.execute()
    assert printed(running.cells[2]) == both("last words")
    assert [output.ename for output in running.cells[2].outputs if output.output_type == "error"] == ["RankError"]
    assert running.cells[3].execution_count is None and running.cells[3].outputs == []


def test_papermill_stops_at_the_failing_cell(tmp_path: Path) -> None:
    source, result = tmp_path / "source.ipynb", tmp_path / "result.ipynb"
    nbformat.write(notebook(*BEFORE, FAILING, AFTER), source)
    with pytest.raises(PapermillExecutionError, match="ValueError: why"):
        papermill.execute_notebook(source, result, kernel_name="python3", progress_bar=False)
    cells = [cell for cell in nbformat.read(result, as_version=4).cells if cell.source in (*BEFORE, FAILING, AFTER)]
    assert printed(cells[1]) == both("seen") and values(cells[1]) == ["[0] 0\n[1] 1"]
    assert cells[3].execution_count is None


class Terminal:
    """IPython in a terminal of its own."""

    def __init__(self) -> None:
        command = ["-m", "IPython", "--simple-prompt", "--no-banner", "--no-confirm-exit", "--colors=NoColor"]
        self._process = pexpect.spawn(sys.executable, command, encoding="utf-8", timeout=60, echo=False)
        self._process.expect(r"In \[\d+\]: ")

    def run(self, *lines: str) -> str:
        """Type a cell. Returns what it shows."""
        self.type(*lines)
        return self.until_prompt()

    def type(self, *lines: str) -> None:
        for line in lines:
            self._process.sendline(line)
        if len(lines) > 1:  # two blank lines end a cell magic
            self._process.sendline("\n")

    def wait_for_both(self, text: str) -> None:
        """Wait until both ranks show this, together or one after the other."""
        self._process.expect(rf"\[0-1\] {text}|\[[01]\] {text}\s+\[[01]\] {text}")

    def until_prompt(self) -> str:
        self._process.expect(r"\r?\nIn \[\d+\]: ")
        return str(self._process.before)

    def interrupt(self) -> None:
        self._process.sendintr()

    def exit(self) -> None:
        self._process.sendline("exit")
        self._process.expect(pexpect.EOF)

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.close(force=True)


@pytest.fixture
def terminal() -> Iterator[Terminal]:
    with Terminal() as terminal:
        yield terminal


def test_a_terminal_ipython_works_with_the_same_magics(terminal: Terminal) -> None:
    terminal.run("%load_ext nbdist")
    assert "2 ranks ready" in terminal.run("%distributed start -n 2")
    output = terminal.run("%%distributed", "print('seen')", "rank + 10")
    assert both_show("seen", output) and "[0] 10" in output and "[1] 11" in output

    failure = terminal.run("%%distributed", "1/0")
    assert "ZeroDivisionError: division by zero" in failure and "line 2" in failure and "same" in failure
    assert "nbdist/" not in failure

    assert "cpu" in terminal.run("%distributed status")
    assert "invalid number of ranks '0'" in terminal.run("%distributed start -n 0")
    terminal.run("%distributed pull rank --as pulled")
    assert "[0, 1]" in terminal.run("pulled")

    terminal.type("%%distributed", "import time; print('asleep'); time.sleep(60)")
    terminal.wait_for_both("asleep")
    terminal.interrupt()
    assert "KeyboardInterrupt" in terminal.until_prompt()
    assert both_show("'again'", terminal.run("%%distributed", "'again'"))

    terminal.run("%distributed auto on")
    assert "[0] 0" in terminal.run("rank")
    terminal.exit()


def test_what_a_front_end_runs_for_itself_stays_in_the_kernel_and_is_no_cell(own_ranks: Kernel) -> None:
    """As VS Code does to list variables: it takes all output for its answer."""
    own_ranks.ok("%distributed auto on")
    own_ranks.ok("%distributed memory on")
    asked = own_ranks.start("asked = 'by the front end'\nprint(asked)", hidden=True).finish()
    assert (asked.stdout, asked.plain) == ("by the front end\n", [])
    cell = own_ranks.ok("print('asked' in globals())")
    assert cell.lines == both("False")
    assert len(cell.plain) == 1  # what it cost


def run_script(folder: Path, code: str) -> subprocess.CompletedProcess[str]:
    script = folder / "script.py"
    script.write_text(code)
    command = [sys.executable, "-W", "error", str(script)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def test_a_plain_script_uses_a_session_without_ipython(tmp_path: Path) -> None:
    done = run_script(
        tmp_path,
        "import os, sys, nbdist\n"
        "def where(offset):\n"
        "    import torch.distributed as dist\n"
        "    return dist.get_rank() + offset\n"
        "with nbdist.Session(2) as session:\n"
        "    assert nbdist.get_session() is session\n"
        "    session.push({'scale': 2})\n"
        "    result = session.run('y = scale * (rank + 1); print(y)')\n"
        "    assert [part.stdout for part in result.values()] == ['2\\n', '4\\n']\n"
        "    assert session.pull('y') == [2, 4]\n"
        "    assert session.call(where, 10) == [10, 11]\n"
        "    session.run('print(\"shown\")', show=True)\n"
        "    try: session.run('1/0')\n"
        "    except nbdist.RankError as error: print(error, 'line 1' in error.report)\n"
        "    pids = [info.pid for info in session.ranks]\n"
        "assert not any(os.path.exists(f'/proc/{pid}') for pid in pids)\n"
        "try: session.run('1')\n"
        "except nbdist.SessionError as error: print(error)\n"
        "try: nbdist.get_session()\n"
        "except nbdist.SessionError as error: print(error)\n",
    )
    assert done.returncode == 0, done.stderr
    *shown, failure, closed, none = done.stdout.splitlines()
    assert lines_by_rank("\n".join(shown)) == both("shown")
    assert "ZeroDivisionError: division by zero True" in failure
    assert "this session is closed" in closed and "no session is running" in none
    assert done.stderr == ""


def test_a_script_that_forgets_its_session_or_fails_leaves_no_rank(tmp_path: Path) -> None:
    done = run_script(tmp_path, "import nbdist\nsession = nbdist.Session(2)\nsession.run('1/0')\n")
    assert done.returncode == 1
    assert "nbdist.errors.RankError" in done.stderr and "ZeroDivisionError" in done.stderr
    if sys.version_info >= (3, 11):
        assert "----> 1 1/0" in done.stderr.splitlines()  # where the rank failed, without colors
