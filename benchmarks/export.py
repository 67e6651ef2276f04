"""What `nbdist export` takes for a notebook, over `jupyter nbconvert --to script`, which writes cells as they are.

Both are whole commands, so it is the time that a user waits; and how it grows with the notebook, in one process.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path

import _tools
import nbformat

CELLS = _tools.size(200, 20)
ROUNDS, INSIDE = 15, 30
BUDGET = 0.5
GROWTH = 12.0  # of ten times as many cells

START = """%load_ext nbdist
%distributed start -n 2
%distributed plan fsdp --accumulate 2"""
CELL = """%%distributed
import torch, nbdist

class Net{number}(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(4))

    def forward(self, rows):
        for layer in self.layers:
            rows = layer(rows).relu()
        return rows

model = Net{number}()
model, optimizer = nbdist.prepare(model, torch.optim.AdamW(model.parameters()))
for step in range(4):
    with nbdist.accumulate(model):
        loss = model(torch.randn(2, 8)).square().mean()
        nbdist.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
print(f"net {number}: {{loss.item():.3f}}")"""
LOCAL = """history_{number} = [number ** 2 for number in range(100)]
print(max(history_{number}))"""


def main() -> None:
    _tools.prepare()
    from nbdist.export.exporting import export

    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        large, small = (_notebook(folder / f"{count}.ipynb", count) for count in (CELLS, CELLS // 10))
        commands = {
            "nbconvert": ["nbconvert", "--to", "script", str(large)],
            "export": ["nbdist", "export", str(large), str(folder / "out.py"), "--force"],
        }
        waits = _tools.rounds(ROUNDS, {name: partial(_wait, words) for name, words in commands.items()}, warm_up=1)
        inside = {
            str(notebook): _tools.timed(partial(export, notebook, folder / "in.py", force=True))
            for notebook in (small, large)
        }
        grown = _tools.rounds(INSIDE, inside, warm_up=2)
    _tools.header(f"a notebook of {CELLS} cells, half of them on ranks, as a script")
    _tools.row("jupyter nbconvert --to script", waits["nbconvert"])
    over = ("nbconvert", waits["nbconvert"])
    _tools.row("nbdist export", waits["export"], over=over, at_most=BUDGET)
    _tools.row(f"  in a process, {CELLS // 10} cells", grown[str(small)])
    ten = (f"{CELLS // 10} cells", grown[str(small)])
    _tools.row(f"  in a process, {CELLS} cells", grown[str(large)], over=ten, at_most=GROWTH)


def _wait(words: list[str]) -> float:
    def call() -> None:
        subprocess.run([sys.executable, "-m", *words], check=True, capture_output=True)

    return _tools.timed(call)()


def _notebook(file: Path, cells: int) -> Path:
    texts = [START, *((CELL if number % 2 else LOCAL).format(number=number) for number in range(1, cells))]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(text) for text in texts])
    nbformat.write(notebook, file)
    return file


if __name__ == "__main__":
    main()
