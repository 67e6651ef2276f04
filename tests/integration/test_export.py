"""`nbdist export`: the script under torchrun computes what the notebook's ranks did, to the bit."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import nbclient
import nbformat
import pytest

NOTEBOOKS = Path(__file__).resolve().parents[2] / "notebooks"

_OF_RANK = "%%distributed\nprint('bits', rank, {})"
_WEIGHTS = "[p.detach().double().sum().item().hex() for p in model.parameters()]"
# For each notebook: the number of ranks, the cell below which its losses are read, and the cell that prints their bits.
LOSSES = {
    "01_quickstart": (2, 6, _OF_RANK.format("[x.hex() for x in losses]")),
    "03_stop_and_go_on": (2, 8, _OF_RANK.format("[x.hex() for x in losses]")),
    "04_plan": (2, 9, "print('bits', 0, [float(row['loss']).hex() for row in rows.values()])"),
    "05_costs": (2, 15, _OF_RANK.format(_WEIGHTS)),
    "06_many_machines": (4, 5, _OF_RANK.format("float(mean).hex(), loss.item().hex()")),
    "07_a_rank_dies": (4, 9, _OF_RANK.format(_WEIGHTS)),
}


def write(path: Path, *cells: str | tuple[str, int | None]) -> Path:
    """Write a notebook of these cells; with a number: the one that the notebook shows beside it."""
    new = nbformat.v4
    found = []
    for cell in cells:
        source, count = cell if isinstance(cell, tuple) else (cell, None)
        found.append(new.new_code_cell(source, execution_count=count))
    nbformat.write(new.new_notebook(cells=found), path)
    return path


def nbdist(*arguments: str | Path, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run the command `nbdist`."""
    command = [sys.executable, "-m", "nbdist", *map(str, arguments)]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120, check=False)


def export(notebook: Path, *flags: str) -> tuple[Path, str]:
    """Export a notebook, and return the script and what was said of it."""
    script = notebook.with_suffix(".py")
    done = nbdist("export", notebook, script, *flags, folder=notebook.parent)
    assert done.returncode == 0, done.stderr
    return script, done.stderr


def torchrun(script: Path, count: int) -> str:
    """Run a script on CPU ranks, and return what they printed, one rank after the other."""
    logs = Path(tempfile.mkdtemp(dir=script.parent))  # as lines of ranks that share a pipe mix
    options = ["--standalone", f"--nproc-per-node={count}", f"--log-dir={logs}", "--redirects=1"]
    command = [sys.executable, "-m", "torch.distributed.run", *options, script.name]
    environment = os.environ | {"MPLBACKEND": "agg", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, cwd=script.parent, env=environment, capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stderr
    (attempt,) = logs.glob("*/attempt_0")
    return "".join((attempt / str(rank) / "stdout.log").read_text() for rank in range(count))


def bits(text: str) -> list[str]:
    """Return the lines with the bits of each rank."""
    return sorted(set(re.findall(r"bits \d+ .*", text)))


def executed(notebook: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Run a notebook in a kernel, and return what its cells printed."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    running: Any = nbformat.read(notebook, as_version=4)
    nbclient.NotebookClient(running, timeout=200, kernel_name="python3").execute(cwd=str(notebook.parent))
    outputs = [output for cell in running.cells if cell.cell_type == "code" for output in cell.outputs]
    return "".join(output.get("text", "") for output in outputs)


@pytest.mark.slow
@pytest.mark.parametrize("name", LOSSES)
def test_losses_of_the_script_are_those_of_the_notebook(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    count, below, code = LOSSES[name]
    monkeypatch.setenv("NBDIST_DEMO_RANKS", str(count))
    notebook: Any = nbformat.read(NOTEBOOKS / f"{name}.ipynb", as_version=4)
    for cell in notebook.cells:  # torch's own seeds differ from process to process
        made = "model = DistributedDataParallel(make"
        cell.source = cell.source.replace(made, f"torch.manual_seed(0)\n{made}")
    places = [number for number, cell in enumerate(notebook.cells) if cell.cell_type == "code"]
    notebook.cells.insert(places[below - 1] + 1, nbformat.v4.new_code_cell(code))
    nbformat.write(notebook, tmp_path / "this.ipynb")
    script, _ = export(tmp_path / "this.ipynb")
    of_script = bits(torchrun(script, count))
    assert of_script and of_script == bits(executed(tmp_path / "this.ipynb", monkeypatch))


def test_a_notebook_that_launches_functions_is_a_program_without_torchrun(tmp_path: Path) -> None:
    (tmp_path / "this.ipynb").write_text((NOTEBOOKS / "02_notebook_launcher.ipynb").read_text())
    script, said = export(tmp_path / "this.ipynb")
    assert "python this.py" in script.read_text() and "cell 7: left out: it is meant to fail" in said


def test_ranks_that_are_healed_are_started_again_by_torchrun(tmp_path: Path) -> None:
    (tmp_path / "this.ipynb").write_text((NOTEBOOKS / "08_a_training_survives.ipynb").read_text())
    script, _ = export(tmp_path / "this.ipynb")
    assert "torchrun --max-restarts 3 --nproc-per-node 2 this.py" in script.read_text()


ODD = (
    "%load_ext nbdist\n%distributed start -n 2\nsession = nbdist.get_session()",
    "lr = 0.1\nxs = []\nxs.append(len('ab'))\nmax = 3\n%distributed push xs lr",
    "%%distributed\nlr = lr * max(1, 2)\n%time y = 3\n%env FOO=bar\ntext = '''\n  %foo\n'''\n(xs, lr, text)",
    "%distributed pull lr -r 0\nlr",
    "%%rank 1\n# only one\nprint('one')\n'''a\nb'''",
    "%%distributed\nimport torch\n_ = torch.manual_seed(7)",
    "import torch\nw = torch.randn(2)\nmodel = [1]\n%distributed push w model",
    "%%distributed\nmodel.append(w.shape[0])\n(model, torch.randn(1).item().hex() if rank == 0 else 0)",
    "model",
    "session.run('z = rank')\nsession.pull('z')",
    "for turn in range(2):\n    session.run('z += 1')\n    print(session.pull('z'))",
    "!echo from {lr}",
)


@pytest.fixture(scope="module")
def odd(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A script from a notebook in which the notebook and its ranks mean different things by the same names."""
    return export(write(tmp_path_factory.mktemp("odd") / "odd.ipynb", *ODD))[0]


def test_the_notebook_s_names_stay_apart_from_those_of_ranks(odd: Path) -> None:
    lines = torchrun(odd, 2).splitlines()
    assert lines.count("([2], 0.2, '\\n  %foo\\n')") == 2
    assert {"0.2", "'a\\nb'", "[1]", "[0, 1]", "[1, 2]", "[2, 3]", "from 0.2", "([1, 2], 0)"} <= set(lines)
    assert lines.count("one") == lines.count("[0, 1]") == 1


def test_random_numbers_of_the_notebook_are_not_those_of_rank_0(odd: Path) -> None:
    one = "import torch; torch.manual_seed(7); print(torch.randn(1).item().hex())"
    first = subprocess.run([sys.executable, "-c", one], capture_output=True, text=True, check=True).stdout.strip()
    assert f"([1, 2], '{first}')" in torchrun(odd, 2)


def test_a_single_process_runs_it_too(odd: Path) -> None:
    done = subprocess.run([sys.executable, odd.name], cwd=odd.parent, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "([2], 0.2, " in done.stdout, done.stderr


def test_a_batch_script_runs_the_script_on_the_nodes_of_a_job(tmp_path: Path) -> None:
    notebook = write(
        tmp_path / "job.ipynb",
        "%load_ext nbdist\n%distributed start -n 2",
        "%%distributed\nprint(f'{rank}\\n', end='')",
    )
    script, _ = export(notebook, "--sbatch")
    programs = {
        "srun": 'exec "$@"',
        "scontrol": "echo 127.0.0.1",
        "torchrun": 'exec "$PYTHON" -m torch.distributed.run "$@"',
    }
    for name, body in programs.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{body}\n")
        (tmp_path / name).chmod(0o755)
    job = {"SLURM_NNODES": "1", "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "here", "PYTHON": sys.executable}
    environment = os.environ | job | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run(
        ["bash", script.with_suffix(".sbatch")],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0 and sorted(done.stdout.split()) == ["0", "1"], done.stderr


def test_cells_in_the_order_in_which_they_were_run(tmp_path: Path) -> None:
    cells = [("%distributed start -n 1", 1), ("%%distributed\nprint('b')", 3), ("%%distributed\nprint('a')", 2)]
    notebook = write(tmp_path / "this.ipynb", *cells, "%%distributed\nprint('never')")
    assert "--as-run" in export(notebook)[0].read_text()
    script, said = export(notebook, "--as-run", "--force")
    assert torchrun(script, 1).split() == ["a", "b"]
    assert "cell 4: left out: it has not been run" in said


@pytest.mark.parametrize(
    ("files", "arguments", "expected"),
    [
        ({}, ["none.ipynb", "out.py"], "none.ipynb can't be read (No such file or directory)"),
        ({"a.ipynb": "x = 3"}, ["a.ipynb", "out.py"], "a.ipynb is not a notebook: it is not JSON"),
        ({"a.ipynb": "[]"}, ["a.ipynb", "out.py"], "a.ipynb is not a notebook: it has no cells"),
        ({"a.ipynb": '{"worksheets": []}'}, ["a.ipynb", "out.py"], "older than version 4"),
        ({"a.ipynb": '{"cells": [3]}'}, ["a.ipynb", "out.py"], "cell 1 is malformed"),
        ({"a.ipynb": '{"cells": []}', "out.py": "mine"}, ["a.ipynb", "out.py"], "out.py exists already: pass --force"),
        ({"a.ipynb": '{"cells": []}'}, ["a.ipynb", "no/out.py"], "there is no folder no"),
        ({"a.ipynb": '{"cells": []}'}, ["a.ipynb", "b.ipynb"], "b.ipynb would be a notebook: name a script"),
        ({"a.ipynb": '{"cells": []}'}, ["a.ipynb", "out.py", "--as-run"], "leave out --as-run"),
        ({"a.ipynb": '{"cells": []}'}, ["a.ipynb", "out.py", "--sbatch"], "starts no ranks"),
    ],
)
def test_bad_input_is_one_clear_line(
    files: dict[str, str], arguments: list[str], expected: str, tmp_path: Path
) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    done = nbdist("export", *arguments, folder=tmp_path)
    assert done.returncode == 2 and expected in done.stderr and done.stderr.count("\n") == 1
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == files


def test_what_can_t_be_exported_is_named_by_cell(tmp_path: Path) -> None:
    cells = {
        "%distributed start -n 1": "",
        "x = (": "cell 2: left out: it is not Python",
        "%%timeit\n3": "cell 3: left out: %%timeit has no counterpart in a script",
        "y = input()": "cell 4: left out: `y = input()`: a script has no input()",
        "print(y)": "cell 5: left out: `print(y)`: it uses 'y' of cell 4, which is left out",
        "%distributed plan fsdp --tp zero": "cell 6: left out: `%distributed plan fsdp --tp zero`",
        "%distributed heal": "cell 7: left out: `%distributed heal`: a script has no session",
        "%%distributed -r {some}\n3": "cell 8: left out: `-r {some}` is known only when the notebook runs",
        "%pip install x": "cell 9: 'pip install x' is a comment: install it where the script runs",
        "%%distributed -b\n3": "cell 10: runs where it stands, not in the background",
        "run = _": "cell 11: left out: `run = _`: it uses the output of another cell",
    }
    _, said = export(write(tmp_path / "this.ipynb", *cells))
    assert [line for line in cells.values() if line not in said] == []


def test_the_file_is_a_notebook_of_version_4(tmp_path: Path) -> None:
    content = {"cells": [{"cell_type": "code", "source": ["x = 3\n", "x"], "metadata": {}, "outputs": []}]}
    (tmp_path / "this.ipynb").write_text(json.dumps(content))
    script, _ = export(tmp_path / "this.ipynb")
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, check=True)
    assert done.stdout == "3\n"
