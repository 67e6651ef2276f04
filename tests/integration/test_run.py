"""`nbdist run`: a script on ranks as under torchrun, and a notebook with parameters as under papermill."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import nbformat
import psutil
import pytest

SCRIPT = """
import argparse, os, sys, time, torch, torch.distributed as dist
parser = argparse.ArgumentParser()
parser.add_argument("--lr", type=float, default=1.0)
parser.add_argument("--fails", type=int, default=-1)
parser.add_argument("--waits", action="store_true")
arguments = parser.parse_args()
dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
optimizer = torch.optim.SGD(model.parameters(), arguments.lr)
for _ in range(5):
    model(torch.randn(3, 4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
if dist.get_rank() == arguments.fails:
    raise ValueError("a broken sample")
print("pid", os.getpid(), flush=True)
if arguments.waits:
    time.sleep(100)
print("lr", arguments.lr, __name__)
sys.exit(0)
"""
START = "import os\nprint('pid', os.getpid())\n%load_ext nbdist\n%distributed start -n {0 + 1}"
DEFAULTS = "%%distributed\nlr = 0.1\nname = 'x'"
TRAIN = "%%distributed\nimport os, time\nprint('pid', os.getpid())\nprint(world_size, lr, name)\n"
REST = "if lr == 7:\n    time.sleep(100)\nif lr == 8:\n    raise ValueError('a broken sample')"


@pytest.fixture
def script(tmp_path: Path) -> Path:
    """A script for torchrun."""
    (tmp_path / "train.py").write_text(SCRIPT)
    return tmp_path / "train.py"


@pytest.fixture
def notebook(tmp_path: Path) -> Path:
    """A notebook with parameters."""
    new = nbformat.v4
    cells = [new.new_code_cell(START), new.new_code_cell(DEFAULTS, metadata={"tags": ["parameters"]})]
    nbformat.write(new.new_notebook(cells=[*cells, new.new_code_cell(TRAIN + REST)]), tmp_path / "this.ipynb")
    return tmp_path / "this.ipynb"


def run(*arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run `nbdist run`."""
    command = [sys.executable, "-m", "nbdist", "run", *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120, check=False)


def interrupted(number: signal.Signals, *arguments: str, folder: Path, count: int = 2) -> int:
    """Run `nbdist run`, send it a signal once it is at work, and return its exit code. No process may be left."""
    command = [sys.executable, "-m", "nbdist", "run", *arguments]
    with open(folder / "output", "w") as output:
        process = subprocess.Popen(command, cwd=folder, stdout=output, stderr=output)
    limit = time.monotonic() + 60
    children: list[psutil.Process] = []
    while (folder / "output").read_text().count("pid") < count:
        assert process.poll() is None and time.monotonic() < limit, (folder / "output").read_text()
        children = psutil.Process(process.pid).children(recursive=True) or children
        time.sleep(0.05)
    children = psutil.Process(process.pid).children(recursive=True) or children
    process.send_signal(number)
    code = process.wait(60)
    pids = [int(pid) for pid in re.findall(r"pid (\d+)", (folder / "output").read_text())]
    gone, alive = psutil.wait_procs([*children, *(psutil.Process(pid) for pid in pids if psutil.pid_exists(pid))], 20)
    assert alive == [], gone
    return code


# --- scripts


def test_a_script_gets_its_arguments_and_ranks_are_named(script: Path) -> None:
    done = run("train.py", "-n", "2", "--", "--lr", "0.5", folder=script.parent)
    assert done.returncode == 0 and "[0-1] lr 0.5 __main__" in done.stdout, done.stderr
    assert re.search(r"^2 ranks, .*; CPU memory at most .* MiB \(rank [01]\); 5 steps, .* each$", done.stdout, re.M)


def test_a_script_runs_on_a_single_rank(script: Path) -> None:
    done = run("train.py", "-n", "1", folder=script.parent)
    assert done.returncode == 0 and "[0] lr 1.0 __main__" in done.stdout, done.stderr


def test_the_first_failure_of_a_script_comes_first(script: Path) -> None:
    done = run("train.py", "-n", "2", "--", "--fails", "1", folder=script.parent)
    assert done.returncode == 1 and "nbdist: rank 1 raised ValueError: a broken sample" in done.stderr
    assert 'raise ValueError("a broken sample")' in done.stderr and "\x1b" not in done.stderr


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_a_script_with_all_its_processes(number: signal.Signals, code: int, script: Path) -> None:
    assert interrupted(number, "train.py", "-n", "2", "--", "--waits", folder=script.parent) == code


# --- notebooks


def test_a_notebook_takes_parameters_and_a_number_of_ranks(notebook: Path) -> None:
    done = run("this.ipynb", "out.ipynb", "-n", "2", "-p", "lr", "0.5", "-p", "name", "me", folder=notebook.parent)
    assert done.returncode == 0 and "[0-1] 2 0.5 me" in done.stdout, done.stderr
    assert re.search(r"^2 ranks, .* s; CPU memory at most .* MiB \(rank [01]\)$", done.stdout, re.M), done.stdout
    cells = nbformat.read(notebook.parent / "out.ipynb", as_version=4).cells
    assert cells[2].source == "%%distributed\n# Parameters\nlr = 0.5\nname = 'me'"
    assert cells[2].metadata.tags == ["injected-parameters"]
    assert "2 0.5 me" in "".join(output.get("text", "") for output in cells[3].outputs)


def test_the_output_of_a_run_can_be_run_with_other_parameters(notebook: Path) -> None:
    run("this.ipynb", "out.ipynb", "-p", "lr", "0.5", folder=notebook.parent)
    done = run("out.ipynb", "again.ipynb", "-p", "lr", "0.25", folder=notebook.parent)
    assert "[0] 1 0.25 x" in done.stdout, done.stderr
    assert len(nbformat.read(notebook.parent / "again.ipynb", as_version=4).cells) == 4


def test_a_notebook_that_fails_is_saved_as_far_as_it_came(notebook: Path) -> None:
    done = run("this.ipynb", "out.ipynb", "-p", "lr", "8", folder=notebook.parent)
    assert done.returncode == 1 and "rank 0 raised ValueError: a broken sample" in done.stderr
    outputs = nbformat.read(notebook.parent / "out.ipynb", as_version=4).cells[3].outputs
    assert "error" in [output.output_type for output in outputs]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_a_notebook_which_is_saved(number: signal.Signals, code: int, notebook: Path) -> None:
    arguments = ("this.ipynb", "out.ipynb", "-p", "lr", "7", "-n", "2")
    assert interrupted(number, *arguments, folder=notebook.parent, count=3) == code  # shown while the cell runs
    assert len(nbformat.read(notebook.parent / "out.ipynb", as_version=4).cells) == 4


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["none.py"], "there is no file none.py"),
        (["none.ipynb"], "none.ipynb can't be read (No such file or directory)"),
        (["train.py", "-n", "0"], "num_processes"),
        (["train.py", "--on", "nowhere"], "nowhere"),
        (["train.py", "-p", "lr", "3"], "train.py is a script: pass its arguments after --"),
        (["this.ipynb", "--", "--lr", "3"], "a notebook takes parameters, not arguments after --: `-p lr 0.1`"),
        (["this.ipynb", "-p", "lrr", "3"], "has no parameter 'lrr': did you mean lr?"),
        (["this.ipynb", "this.ipynb"], "this.ipynb exists already (it is the notebook itself): pass --force"),
        (["this.ipynb", "out.py"], "out.py is not a notebook: name it with the suffix .ipynb"),
        (["this.ipynb", "no/out.ipynb"], "there is no folder no"),
    ],
)
def test_bad_arguments_are_one_clear_line(arguments: list[str], expected: str, notebook: Path, script: Path) -> None:
    before = sorted(notebook.parent.iterdir())
    done = run(*arguments, folder=notebook.parent)
    assert done.returncode == 2 and expected in done.stderr and done.stderr.count("\n") == 1, done.stderr
    assert sorted(notebook.parent.iterdir()) == before


def test_without_nbclient_one_line_says_what_to_install(notebook: Path) -> None:
    code = "import sys; sys.modules['nbclient'] = None; from nbdist.command import main; "
    code += "sys.exit(main(['run', 'this.ipynb']))"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=notebook.parent, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2 and "pip install 'nbdist[run]'" in done.stderr and done.stderr.count("\n") == 1
